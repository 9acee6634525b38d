"""Text of HTML, read by a parser that checks its tags."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """A parser that collects the cells of tables by row and the sources of images. All tags must be closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.images: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    @property
    def cells(self) -> list[str]:
        return [cell for row in self.rows for cell in row]

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.images.append(dict(attributes)["src"])
        elif tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "tr" in self.open and self.open[-1] != "tr":
            self.rows[-1][-1] += data
