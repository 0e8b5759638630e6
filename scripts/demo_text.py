"""Write plain English text to JSONL: Wikipedia articles and news that ship as test data inside the gensim wheel.

One article per line, as `{"text": ...}`. Every sixth long article is held out; the others are dealt to the calibration
draws, so that two draws share no article and none shares one with the held-out text. gensim itself is never imported
(only its data files are read): `pip install --no-deps gensim` is enough.
"""

from __future__ import annotations

import argparse
import bz2
import html
import importlib.util
import json
import random
import re
import sys
import sysconfig
from pathlib import Path

WIKIPEDIA_FILE = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
NEWS_FILE = "lee_background.cor"
HELD_OUT_EVERY = 6
MIN_WIKIPEDIA_CHARS = 4000
MIN_SOURCE_CHARS = 4000

_PAGE = re.compile(r"<page>.*?<ns>(\d+)</ns>.*?<text[^>]*>(.*?)</text>", re.DOTALL)
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_TABLE = re.compile(r"\{\|(?:(?!\{\|).)*?\|\}", re.DOTALL)
_FILE_LINK = re.compile(r"\[\[(?:File|Image|Category):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", re.IGNORECASE)
_LANGUAGE_LINK = re.compile(r"^\[\[[a-z\-]{2,12}:[^\]]*\]\]\s*$", re.MULTILINE)
_LAST_SECTIONS = re.compile(
    r"^==\s*(?:References|Notes|Footnotes|See also|External links|Further reading|Bibliography|Sources|Citations)\b",
    re.IGNORECASE | re.MULTILINE,
)
_DEFINITION = re.compile(r"^(?:class|def) ", re.MULTILINE)
# In order: a later pattern relies on what an earlier one has removed.
_SUBSTITUTIONS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"<ref[^<>]*/>"), ""),
    (re.compile(r"<(ref|math|gallery|timeline|syntaxhighlight|source)\b.*?</\1>", re.DOTALL | re.IGNORECASE), ""),
    (re.compile(r"</?[a-zA-Z][^<>]*>"), ""),
    (re.compile(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]"), r"\1"),
    (re.compile(r"\[(?:https?|ftp):[^\s\]]*\s?([^\]]*)\]"), r"\1"),
    (re.compile(r"'{2,}"), ""),
    (re.compile(r"^=+\s*(.*?)\s*=+\s*$", re.MULTILINE), r"\1"),
    (re.compile(r"^[*#:;]+\s*", re.MULTILINE), ""),
    (re.compile(r"^[ \t]*[|!].*$", re.MULTILINE), ""),
    (re.compile(r"__[A-Z]+__"), ""),
    (re.compile(r"\(\s*[;,]?\s*\)"), ""),
    (re.compile(r"[ \t\u00a0]+"), " "),
    (re.compile(r" +([,.;:)])"), r"\1"),
    (re.compile(r" *\n *"), "\n"),
    (re.compile(r"\n{3,}"), "\n\n"),
)


def find_data_dir() -> Path:
    """Return gensim's test data folder, found without importing gensim.

    Raises:
        FileNotFoundError: if gensim is not installed here.
    """
    spec = importlib.util.find_spec("gensim")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("package 'gensim' is not installed: pip install --no-deps gensim, or give --data_dir")
    return Path(next(iter(spec.submodule_search_locations))) / "test" / "test_data"


def _remove_nested(pattern: re.Pattern[str], text: str) -> str:
    """Delete innermost matches until none is left, which removes nested templates and tables whole."""
    while True:
        text, num_removed = pattern.subn("", text)
        if num_removed == 0:
            return text


def strip_wiki_markup(markup: str) -> str:
    """Turn one article's wikitext into readable paragraphs; lists of references at the end are dropped."""
    text = html.unescape(html.unescape(markup))
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    ending = _LAST_SECTIONS.search(text)
    if ending is not None:
        text = text[: ending.start()]
    # References go first: they hold templates whose unbalanced braces would swallow the paragraph around them.
    for pattern, replacement in _SUBSTITUTIONS[:2]:
        text = pattern.sub(replacement, text)
    text = _remove_nested(_TEMPLATE, text)
    text = _remove_nested(_TABLE, text)
    text = _LANGUAGE_LINK.sub("", _FILE_LINK.sub("", text))
    for pattern, replacement in _SUBSTITUTIONS[2:]:
        text = pattern.sub(replacement, text)
    return text.strip()


def read_wikipedia(data_dir: Path, min_chars: int = MIN_WIKIPEDIA_CHARS) -> list[str]:
    """Return the plain text of every article (no redirects) with at least `min_chars` characters, in dump order."""
    with bz2.open(data_dir / WIKIPEDIA_FILE, "rt", encoding="utf-8") as dump:
        pages = _PAGE.findall(dump.read())
    markups = (text for namespace, text in pages if namespace == "0" and not text.lower().startswith("#redirect"))
    articles = (strip_wiki_markup(markup) for markup in markups)
    return [article for article in articles if len(article) >= min_chars]


def read_news(data_dir: Path) -> list[str]:
    """Return the 300 short news articles of the Lee corpus, in file order (roughly 200 words each)."""
    lines = (data_dir / NEWS_FILE).read_text(encoding="latin-1").splitlines()
    return [line.strip() for line in lines if line.strip()]


def read_python_source(min_chars: int = MIN_SOURCE_CHARS) -> list[str]:
    """Return the code of the running Python's own modules from their first class or function on, in order of name.

    It differs a little from one Python version to the next.
    """
    sources = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        first = _DEFINITION.search(text)
        if first is not None and len(text) - first.start() >= min_chars:
            sources.append(text[first.start() :])
    return sources


READ_SOURCE = {"wikipedia": read_wikipedia, "news": read_news}


def split_articles(articles: list[str], num_draws: int, seed: int = 0) -> tuple[list[list[str]], list[str]]:
    """Split articles into `num_draws` disjoint calibration lists and one held-out list, the same way every time.

    Returns:
        `(draws, held_out)`; the draws differ in size by one article at most.
    """
    held_out = articles[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    remaining = [article for index, article in enumerate(articles) if index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    random.Random(seed).shuffle(remaining)
    return [remaining[draw::num_draws] for draw in range(num_draws)], held_out


def write_jsonl(path: Path, texts: list[str]) -> None:
    """Write one `{"text": ...}` object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_text("".join(lines), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and write `<source>-calibration-<i>.jsonl` and `<source>-held-out.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path, help="folder for the JSONL files")
    parser.add_argument("--source", choices=sorted(READ_SOURCE), default="wikipedia", help="which text (wikipedia)")
    parser.add_argument("--data_dir", type=Path, help="gensim's test_data folder; default: found in this environment")
    parser.add_argument("--draws", type=int, default=3, help="number of disjoint calibration files (3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffle before dealing out articles (0)")
    args = parser.parse_args(argv)
    if args.draws < 1:
        parser.error(f"--draws ({args.draws}) must be at least 1")
    try:
        articles = READ_SOURCE[args.source](args.data_dir or find_data_dir())
    except OSError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    draws, held_out = split_articles(articles, args.draws, args.seed)
    files = {f"{args.source}-calibration-{index}.jsonl": texts for index, texts in enumerate(draws)}
    files[f"{args.source}-held-out.jsonl"] = held_out
    for name, texts in files.items():
        write_jsonl(args.output_dir / name, texts)
        print(f"{args.output_dir / name}: {len(texts)} articles, {sum(map(len, texts))} characters")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
