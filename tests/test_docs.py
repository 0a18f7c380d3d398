"""Links between the documents lead somewhere: to a file, and to a heading that it has. So do names
of code, such as learner.py:group_targets."""

import re

import pytest

from common import ROOT

DOCUMENTS = ["README.md", "LOG.md", "compare/evidence/README.md"]
DOCUMENTS += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
CODE = re.compile(r"([\w/]+\.py):([A-Za-z]\w*(?:\.\w+)?)")
LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^]]+\]: (\S+)", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """What GitHub makes of a document's headings."""
    names = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        shown = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)
        names.add(re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-"))
    return names


def broken_links(document: str, text: str) -> list[str]:
    broken = []
    for target in (one or other for one, other in LINK.findall(text)):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        if not file.exists():
            broken.append(target)
        elif anchor and anchor not in anchors(file.read_text() if path else text):
            broken.append(target)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    assert broken_links(document, (ROOT / document).read_text()) == []


def test_broken_links_are_seen():
    text = "# A heading, `x`\n[a](#a-heading-x) [b](#gone) [c](docs/no.md) [d](docs/data.md#no)\n"
    text += "[e](https://example.org/#x)\n[f]: docs/data.md\n[g]: gone.py\n"
    assert broken_links("README.md", text) == ["#gone", "docs/no.md", "docs/data.md#no", "gone.py"]


def unknown_names(text: str) -> list[str]:
    unknown = []
    for file, name in CODE.findall(text):
        path = ROOT / file
        code = path.read_text() if path.exists() else ""
        for part in name.split("."):  # a class and its method
            # a function or class, a constant, a field of a class
            defined = rf"^\s*(?:def |class ){part}\b|^{part}\b.* = |^    {part}: "
            if not re.search(defined, code, re.MULTILINE):
                unknown.append(f"{file}:{name}")
    return unknown


# LOG.md tells of code as it was
@pytest.mark.parametrize("document", sorted({*DOCUMENTS, "assets/step.svg"} - {"LOG.md"}))
def test_names_of_code_exist(document):
    assert unknown_names((ROOT / document).read_text()) == []


def test_unknown_names_are_seen():
    text = "`train.py:train` `train.py:gone` `gone.py:train` `checks.py:OBJECTIVES` "
    text += "`rollout.py:VllmEngine.gone`"
    assert unknown_names(text) == ["train.py:gone", "gone.py:train", "rollout.py:VllmEngine.gone"]
