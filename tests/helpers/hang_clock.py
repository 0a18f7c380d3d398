"""A clock for a pool of workers: on a busy machine no job is late but those that are to be."""

import time


class Clock:
    """`pool.clock = Clock(pool, hangs)`. It goes on only while every busy worker is at a text of
    which hangs(text) is true. A text of which naps(text) is true takes one second of it."""

    def __init__(self, pool, hangs, naps=lambda text: False):
        self.pool = pool
        self.hangs = hangs
        self.naps = naps
        self.seconds = pool.clock()  # goes on from there
        self.last = time.monotonic()

    def __call__(self) -> float:
        now = time.monotonic()
        if self.only_hangs():
            self.seconds += now - self.last
        self.last = now
        return self.seconds + sum(self.naps(self.text_of(key)) for key in self.pool.results)

    def only_hangs(self) -> bool:
        busy = [worker for worker in self.pool.workers if worker.jobs or not worker.ready]
        if not all(worker.ready for worker in busy):
            return False
        return bool(busy) and all(self.hangs(self.text_of(worker.jobs[0])) for worker in busy)

    def text_of(self, key) -> str:
        return self.pool.asked[key][1]  # of (function, text, row)
