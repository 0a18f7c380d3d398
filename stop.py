"""How a run is asked to end early: SIGTERM, SIGINT or SIGUSR1 to any of its ranks, or a file `stop` in its folder.

    stop = Stop(folder, rank)
    asked = stop.asked()        # on this rank; all ranks then agree, finish the step, save together and exit with 0

The file is what a scheduler uses: torchrun passes SIGTERM and SIGINT on but then returns 1, and dies of SIGUSR1 itself. A run that starts
removes it; a run that is finished writes `done`, so `stop` without `done` means: not finished, may go on. A second signal ends the process at once.
"""

import os
import signal
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stop:
    def __init__(self, folder, rank: int):
        self.file, self.heard = Path(folder) / "stop" if rank == 0 else None, 0
        for number in SIGNALS:
            signal.signal(number, self.hear)

    def hear(self, number: int, frame) -> None:
        if self.heard:
            os._exit(
                128 + number
            )  # checkpoints are renamed when they are whole: nothing to tidy up
        self.heard = number

    def asked(self) -> bool:
        return bool(self.heard) or (self.file is not None and self.file.exists())
