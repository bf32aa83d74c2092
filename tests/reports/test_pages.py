import html.parser
import re

from osprey_jax.reports.pages import Bar, Bars, Bullets, Cell, Heading, Table, Text, Verdict, markdown, page

BLOCKS = [
    Heading("A title", 1),
    Verdict("Serve with it.", "good", ["It is cheap.", "It is fast."]),
    Text("Words."),
    Bullets(["one", "two"]),
    Table(["arm", "cost"], [["a", Cell("1.5", "bad", "1 to 2")], ["b", "2"]]),
    Bars("cost", [Bar("a", 0.8, 0.7, 0.9, "−20%"), Bar("b", 1.2, None, None, "+20%")], 1.0, "as off"),
]


class Reader(html.parser.HTMLParser):
    """Tags, their attributes and the text of a page, and whether each tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_markdown():
    """Blocks as any Markdown reader knows them; what is bad is bold, an interval stands in brackets."""
    assert markdown(BLOCKS) == (
        "# A title\n\n> **Serve with it.**\n>\n> It is cheap.\n>\n> It is fast.\n\nWords.\n\n- one\n- two\n\n"
        "| arm | cost |\n| --- | ---: |\n| a | **1.5 (1 to 2)** |\n| b | 2 |\n"
    )


def test_html_is_whole():
    """Every tag is closed, and each number has its row's and column's name in a header cell."""
    reader = Reader(page("A title", BLOCKS))
    assert not reader.open
    assert reader.tags.count("th") == 4 and reader.tags.count("td") == 2
    assert ("scope", "row") in reader.attributes and ("scope", "col") in reader.attributes


def test_html_asks_for_nothing():
    """It can be sent on, opened without a network, and runs nothing."""
    text = page("A title", BLOCKS)
    reader = Reader(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert not {"src", "href"} & {name for name, _ in reader.attributes}
    assert not any(name.startswith("on") for name, _ in reader.attributes)
    assert "url(" not in text and "@import" not in text and "http" not in text.replace("http-equiv", "")
    assert "default-src 'none'" in text


def test_html_escapes():
    """A drafter's name or an answer cannot become markup, wherever it stands."""
    evil = "<script>x</script>\" onload=\"x & 'y'"
    blocks = [
        Heading(evil),
        Verdict(evil, "bad", [evil]),
        Text(evil),
        Bullets([evil]),
        Table([evil], [[evil, evil, Cell(evil, "bad", evil)]]),
        Bars(evil, [Bar(evil, 1.0, None, None, evil)], 1.0, evil),
    ]
    reader = Reader(page(evil, blocks))
    assert "script" not in reader.tags
    assert not any(name.startswith("on") for name, _ in reader.attributes)
    assert sum(evil in text for text in reader.texts) == 14, "and it is read as it was written"


def test_markdown_escapes():
    """A pipe ends no cell, a newline no row; HTML, emphasis, links, lists and entities stay text."""
    evil = "a|b\nc <b>d</b> *e* _f_ `g` [h](i) &lt; \\"
    line = markdown([Table(["x", "y"], [["r", evil]])]).splitlines()[2]
    assert line == r"| r | a\|b c \<b\>d\</b\> \*e\* \_f\_ \`g\` \[h\](i) &amp;lt; \\ |"
    assert len(re.findall(r"(?<!\\)\|", line)) == 3
    starts = ["- a", "1. a", "2) a", "+ a", "# a", "> a", "==="]
    assert [markdown([Text(text)]).strip() for text in starts] == [
        r"\- a",
        r"1\. a",
        r"2\) a",
        r"\+ a",
        r"\# a",
        r"\> a",
        "===",
    ]
    assert markdown([Text("1.5 and -3")]) == "1.5 and -3\n", "numbers are not lists"


def test_what_does_not_print_is_shown_as_an_escape():
    """Half a character breaks no file, and nothing turns the direction of the text after it."""
    blocks = [Text("a\ud800b \u202ec \x1b[1m d\x00")]
    for text in (page("t", blocks), markdown(blocks)):
        text.encode()
        assert "ud800" in text and "u202e" in text and "u001b" in text and "u0000" in text
        assert "\u202e" not in text and "\x1b" not in text


def test_bars_lie_on_one_axis():
    """Left is less, and the dot lies within its interval."""
    text = page("t", BLOCKS)
    dots = [float(x) for x in re.findall(r'class="dot" style="left:([\d.]+)%', text)]
    zeros = [float(x) for x in re.findall(r'class="zero" style="left:([\d.]+)%', text)]
    [(left, width)] = re.findall(r'class="spread" style="left:([\d.]+)%;width:([\d.]+)%', text)
    assert 0 < float(left) < dots[0] < float(left) + float(width) < zeros[0] == zeros[1] < dots[1] < 100


def test_bars_all_alike():
    """One value, which is that of the line, still has a place."""
    assert 'class="dot" style="left:50.0%"' in page("t", [Bars("t", [Bar("a", 1.0, 1.0, 1.0, "0")], 1.0, "off")])
