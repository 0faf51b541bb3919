"""WebShop: shopping in a web store, as the client of a running server (``web_agent_site`` of princeton-nlp/WebShop).

The pages are fetched and turned into text with ``[buttons]``, as ReAct's WebShop notebook does.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import Any, NamedTuple
from urllib.parse import quote

from psrl.agents.env.base import Environment, EnvironmentFault, Observation, task_value
from psrl.errors import InputError

SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")
_SCORE = "Your score (min 0.0, max 1.0)"
_SILENT_TAGS = {"script", "style", "head", "title"}


class Page(NamedTuple):
    """What a page of the store shows."""

    text: str
    buttons: tuple[str, ...]
    products: tuple[str, ...]
    """Ids (ASIN) of the products it links to."""
    options: dict[str, str]
    """Choice (a colour, a size) to its kind."""
    score: float | None
    """Of the purchase, on the last page."""


class _PageParser(HTMLParser):
    """Collects the visible strings of a page and the kind of each: button, product, option or text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[tuple[str, str]] = []
        self._open: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("input", "br", "img", "meta", "link", "hr"):
            self._open.append((tag, dict(attrs).get("class") or ""))

    def handle_endtag(self, tag: str) -> None:
        # Closes what the page left open inside it.
        if any(name == tag for name, _ in self._open):
            while self._open.pop()[0] != tag:
                pass

    def handle_data(self, data: str) -> None:
        text = " ".join(data.replace("\\n", " ").split())
        if not text or any(name in _SILENT_TAGS for name, _ in self._open):
            return
        tag, css_class = self._open[-1] if self._open else ("", "")
        kind = {"button": "button", "label": "option"}.get(tag, "product" if css_class == "product-link" else "text")
        self.pieces.append((kind, text))


def read_page(html: str, chosen: Mapping[str, str] | None = None, *, max_products: int = 10) -> Page:
    """Parse a page; choices that are already made stand in double brackets.

    Args:
        max_products: products shown of a page of results.
    """
    parser = _PageParser()
    parser.feed(html)
    lines: list[str] = []
    buttons, products, options, score = [], [], {}, None
    option_kind = ""
    for i, (kind, text) in enumerate(parser.pieces):
        if text == _SCORE:
            score = _score(parser.pieces[i + 1 : i + 2])
        if kind == "product":
            products.append(text)
        if len(products) > max_products and kind != "button":
            continue
        if kind == "option":
            options[text] = option_kind
            mark = f"[[{text}]]" if text in (chosen or {}).values() else f"[{text}]"
            lines[-1:] = [f"{lines[-1]} {mark}"] if lines else [mark]
            continue
        if kind == "button":
            buttons.append(text)
        elif kind == "text":
            option_kind = text
        lines.append(text if kind == "text" else f"[{text}]")
    return Page("\n".join(lines), tuple(buttons), tuple(products[:max_products]), options, score)


def _score(following: list[tuple[str, str]]) -> float:
    try:
        return float(following[0][1])
    except (IndexError, ValueError) as error:
        raise EnvironmentFault(f"the WebShop server's last page has no number after {_SCORE!r}") from error


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in the store the agent is; decides the address of the page."""

    kind: str = "init"
    query: str = ""
    page: int = 1
    product: str = ""
    sub_page: str = ""
    options: dict[str, str] = field(default_factory=dict)

    def path(self, session: str) -> str:
        options = quote(str(self.options), safe="")
        query, product = quote(self.query, safe=""), quote(self.product, safe="")
        return {
            "init": f"/{session}",
            "search": f"/search_results/{session}/{query}/{self.page}",
            "item": f"/item_page/{session}/{product}/{query}/{self.page}/{options}",
            "item_sub": f"/item_sub_page/{session}/{product}/{query}/{self.page}/{self.sub_page}/{options}",
            "end": f"/done/{session}/{product}/{options}",
        }[self.kind]


class WebShopEnvironment(Environment):
    """Actions ``search[words]`` and ``click[button]``. The reward is the server's score of the purchase, 0 .. 1.

    Keys of a task: ``goal``, the number of a goal of the server.
    """

    def __init__(self, url: str = "http://127.0.0.1:3000", timeout: float = 30.0, max_products: int = 10) -> None:
        """
        Args:
            url: address of the WebShop server.
            timeout: seconds to wait for a page.
            max_products: products shown of a page of results.
        """
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.max_products = max_products
        self._session = ""
        self._place = _Place()
        self._page = Page("", (), (), {}, None)

    def reset(self, task: Mapping[str, Any]) -> Observation:
        # The server takes the goal's number from a session name that has "fixed" in it and ends in "_<number>".
        self._session = f"{uuid.uuid4().hex}_fixed_{task_value(task, 'goal', int)}"
        return self._go(_Place())

    def step(self, action: str) -> Observation:
        if not self._session:
            raise InputError("step before reset")
        found = re.fullmatch(r"(search|click)\[(.*)\]", action.strip(), flags=re.DOTALL)
        admissible = self._admissible()
        if found is None:
            return Observation(f"Not an action: {action}", admissible=admissible)
        name, argument = found.groups()
        if name == "search":
            # Slashes and brackets would change the address: the server routes by path and evaluates a list.
            query = " ".join(re.sub(r"[\[\]/]", " ", argument).split())
            if self._place.kind != "init" or not query:
                return Observation("There is nothing to search with on this page.", admissible=admissible)
            return self._go(_Place("search", query))
        place = self._clicked(argument.strip())
        if place is None:
            return Observation(f"There is no [{argument}] on this page.", admissible=admissible)
        return self._go(place)

    def _clicked(self, button: str) -> _Place | None:
        """The place behind a button; None where this page has no such button."""
        place, page = self._place, self._page
        if button in page.products:
            return replace(place, kind="item", product=button, options={})
        if button in page.options and place.kind == "item":
            return replace(place, options={**place.options, page.options[button]: button})
        if button not in page.buttons:
            return None
        if button == "Back to Search":
            return _Place()
        if button == "Next >":
            return replace(place, page=place.page + 1)
        if button == "< Prev":
            if place.kind == "search":
                return replace(place, page=max(1, place.page - 1))
            return replace(place, kind="search" if place.kind == "item" else "item")
        if button == "Buy Now":
            return replace(place, kind="end")
        return replace(place, kind="item_sub", sub_page=button) if button in SUB_PAGES else None

    def _go(self, place: _Place) -> Observation:
        address = self.url + place.path(self._session)
        try:
            with urllib.request.urlopen(address, timeout=self.timeout) as answer:
                html = answer.read().decode("utf-8", errors="replace")
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            raise EnvironmentFault(
                f"the WebShop server does not answer at {address}: {error}: start it, or name another with the "
                "environment's option url"
            ) from error
        self._place, self._page = place, read_page(html, place.options, max_products=self.max_products)
        if place.kind != "end":
            return Observation(self._page.text, admissible=self._admissible())
        if self._page.score is None:
            raise EnvironmentFault(f"the WebShop server's last page has no score: {self._page.text[:200]}")
        score = self._page.score
        return Observation(f"{_SCORE}: {score}", reward=score, done=True, success=score == 1.0)

    def _admissible(self) -> tuple[str, ...]:
        page = self._page
        searches = ("search[...]",) if self._place.kind == "init" else ()
        clickable = [*page.buttons, *page.products, *page.options]
        return (*searches, *(f"click[{name}]" for name in clickable if name != "Search"))
