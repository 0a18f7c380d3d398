"""Links between the documents lead somewhere: to a file, and to a heading that it has."""

import re

import pytest

from common import ROOT

DOCUMENTS = ["README.md", "LOG.md", "compare/evidence/README.md"]
DOCUMENTS += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
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
