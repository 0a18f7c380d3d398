"""The words of strangers in sentences of ours."""

import child

from common import RunStopped, UserError, in_one_line, quoted, script


def say_on_the_way_out(argv, kind=UserError):
    raise kind("row \x1b[2J\nerror: forged \u202e \ud800 is odd")


def test_what_strangers_say_is_one_harmless_line(tmp_path):
    """Nothing of it steers the terminal or looks like a line of ours."""
    assert quoted("a\x1b[2J\nb\u202e\ud800") == r"'a\x1b[2J\nb\u202e\ud800'"
    assert quoted("it's") == '"it\'s"' and quoted(7) == "7" and quoted(OSError("a\n")) == r"'a\n'"
    assert quoted("x" * 300) == f"'{'x' * 200}'..." and quoted("abc", 2) == "'ab'..."
    assert in_one_line("plain \u00fc") == "plain \u00fc" and in_one_line("a\nb\x1b") == r"a b\x1b"
    assert in_one_line("x" * 9, 6) == "xxx..." and in_one_line("x" * 6, 6) == "x" * 6
    for kind, status in ((UserError, 2), (RunStopped, 1)):
        log = tmp_path / kind.__name__
        ended = child.start(script, say_on_the_way_out, [], kind, log=log)
        assert child.status(ended) == status, log.read_text()
        line = log.read_text().splitlines()[-1]
        assert line == r"error: row \x1b[2J error: forged \u202e \ud800 is odd"
