"""push_to_hub: full checkpoints to the Hugging Face hub, in the background while the run goes on.

    hub = Hub(repo, private, folder)        # before the run: makes the repository, so that a wrong name or token shows at once
    hub.push(path)                          # a checkpoint's Hugging Face files, not DeepSpeed's; only rank 0 does
    hub.finish()                            # waits for the last one; a run that is stopped does not

The token is the one of `hf auth login` or of the environment (HF_TOKEN). It is in no config, and so in no log.
"""

import os
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import disable_progress_bars
from tqdm import tqdm

from common import RunStopped, UserError, escaped, quoted

PRIVATE = (
    "engine",
    "rng_",
    "controller_state.json",
    "train_config.json",
    "manifest.json",
)  # ours, not a model's
LONGEST = 3600.0  # seconds that the end of a run waits for its last upload


def in_background(work) -> Future:
    """work() in a thread that does not keep the process alive."""
    done = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # raised again where somebody waits for it
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def link_model(path: Path, copy: Path) -> None:
    """The model's files of a checkpoint once more: the checkpoint itself may be pruned before they are uploaded. Copies where a file system has no links."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for file in path.iterdir():
        if not file.name.startswith(PRIVATE):
            try:
                os.link(file, copy / file.name)
            except OSError:
                shutil.copy2(file, copy / file.name)


class Hub:
    def __init__(self, repo: str, private: bool, folder: Path):
        disable_progress_bars()  # they would cut through ours
        self.api, self.folder, self.going = HfApi(), Path(folder), None
        try:
            self.repo = self.api.create_repo(repo, private=private, exist_ok=True).repo_id
        except Exception as error:  # of huggingface_hub and its HTTP library: no token, no network, no rights, no such name
            raise UserError(
                f"push_to_hub={repo!r}: the hub does not let us make or use this repository: {quoted(' '.join(str(error).split()), 300)}; set HF_TOKEN to a "
                f'token that may write, or push_to_hub to ""'
            ) from None

    def push(self, path: Path, last: bool = False) -> None:
        """Begins to upload; while an earlier upload still runs, leaves this one out, unless it is the last."""
        if not (path / "config.json").exists() or not list(path.glob("*.safetensors*")):
            return  # "shallow": no model in it
        if self.going and not (last or self.going[1].done()):
            return tqdm.write(f"not pushed: {path}, {self.going[0].name} is still on its way")
        self.finish(stop=False)
        copy = self.folder / f"push_{path.name}.tmp"
        try:
            link_model(path, copy)
        except OSError as error:
            upload = Future()
            upload.set_exception(error)
        else:
            upload = in_background(
                lambda: self.api.upload_folder(
                    repo_id=self.repo, folder_path=copy, commit_message=path.name
                )
            )
        self.going = path, upload, copy

    def finish(self, stop: bool = True) -> None:
        """Waits for the upload that is under way. One that failed is a sentence, with `stop` RunStopped: nothing else is lost by it."""
        if not self.going:
            return
        (path, upload, copy), self.going = self.going, None
        try:
            tqdm.write(f"pushed {path} to {escaped(upload.result(LONGEST).commit_url)}")
        except Exception as error:  # of huggingface_hub, its HTTP library and the operating system
            sentence = f"{path} was not pushed to {self.repo}: {type(error).__name__}: {quoted(' '.join(str(error).split()), 300)}"
            if stop:
                raise RunStopped(f"{sentence}; by hand: hf upload {self.repo} {path}") from None
            tqdm.write(f"warning: {sentence}")
        finally:
            shutil.rmtree(copy, ignore_errors=True)
