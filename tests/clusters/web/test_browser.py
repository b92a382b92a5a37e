"""The pages in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tensorvine.actors import Repository
from tensorvine.actors.engine.engine import Engine
from tensorvine.clusters.web.server import Server, listening
from tensorvine.store import Layer, ModelGraph

from tests.support.browser import Browser, Keys, chromium
from tests.support.disk import kill_shard
from tests.support.waiting import eventually
from tests.support.web import TOKEN, Served, served, serving

HTML = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>"
NAME = "A.b_c-d/0/Z..z"
"""A name with all characters that names may have."""
PATHS = {
    "now": "",
    "compare": f"compare?a={NAME}@1&b={NAME}@2",
    "version": f"version?ref={NAME}@2",
    "lineage": f"lineage?ref={NAME}@1",
    "changes": f"changes?ref={NAME}@2",
}
METADATA = {HTML: HTML, "long": f"{HTML} " * 12_000, "big": 2**60}


def graph(units: int) -> ModelGraph:
    layers = [
        Layer("in", {"class": "Input"}),
        Layer(HTML, {"class": HTML, HTML: HTML}, ("in",), (f"{HTML}/w",)),
        Layer("head", {"class": "Dense", "units": units}, (HTML,), ("head/w", "head/b")),
    ]
    return ModelGraph(layers)


def tensors(units: int, start: float) -> dict[str, np.ndarray]:
    head = np.arange(start, start + 4 * units, dtype=np.float32).reshape(4, units) * (-1) ** np.arange(units)
    return {f"{HTML}/w": np.ones((4, 4), np.float32), "head/w": head, "head/b": np.full(units, np.nan)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def repo(browser: Browser, cluster: Engine) -> Iterator[Repository]:
    with Repository.start("web-browser", shards=1, preallocate_bytes=0, metadata_bytes="4MB") as started:
        started.save(NAME, tensors(2, 0.0), graph=graph(2), quality=0.5)
        started.save(NAME, tensors(2, 1.0), graph=graph(2), quality=float("nan"), metadata=METADATA)
        for n in range(6):
            started.save(f"leaf-{n}", {HTML: np.full(3, n)}, parent=f"{NAME}@2", quality=n / 10)
        yield started


@pytest.fixture(scope="module")
def page(repo: Repository) -> Iterator[Served]:
    with served(repo, allow_changes=True) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh(browser: Browser) -> Iterator[None]:
    """A viewer without a cookie, in a wide window; no error stays unseen."""
    browser.driver.delete_all_cookies()
    browser.resize(1280)
    browser.scheme("light")
    browser.errors()
    yield
    browser.driver.get("about:blank")


def test_now_shows_a_new_version_without_a_reload(browser: Browser, page: Served, repo: Repository) -> None:
    browser.open(page)
    browser.find("section", "Nodes and shards")
    browser.script("window.same = true")
    browser.find("#state", "live")
    link = browser.find("td a", "leaf-5@1")
    browser.script("arguments[0].focus()", link)
    repo.save("arrived", {"w": np.zeros(4)})
    browser.find("td a", "arrived@1")
    assert browser.script("return window.same")
    assert browser.errors() == []


def test_two_versions_are_side_by_side(browser: Browser, page: Served) -> None:
    browser.open(page, PATHS["compare"], ".layers")
    assert f"{NAME}@1 → {NAME}@2" in browser.find("h2.pair").text
    changed = browser.find(".layer[open] tr", "head/w").text
    assert "changed" in changed
    assert "8 of 8" in changed
    bars = browser.find(".layer[open] .histogram").find_elements("css selector", "rect")
    assert len([bar for bar in bars if float(bar.get_attribute("height") or 0) > 0]) == 2
    assert len(browser.driver.find_elements("css selector", ".layer")) == 3
    browser.find(".check input").click()
    layers = browser.driver.find_elements("css selector", ".layer")
    eventually(lambda: [one.is_displayed() for one in layers] == [False, False, True], "only differences are shown")
    assert browser.errors() == []


def test_versions_are_suggested_and_chosen_by_keyboard(browser: Browser, page: Served) -> None:
    browser.open(page, "compare", "#a")
    browser.script("document.getElementById('a').focus()")
    browser.press("leaf-3")
    eventually(lambda: browser.script("return [...document.querySelectorAll('#a-list option')].map((o) => o.value)")
               == ["leaf-3@1"], "the version is suggested")  # fmt: skip
    browser.press("@1", Keys.TAB, "leaf-4@1", Keys.ENTER)
    browser.find("h2.pair", "leaf-3@1 → leaf-4@1")


def test_the_graph_is_walked_and_unfolded_by_keyboard(browser: Browser, page: Served) -> None:
    browser.open(page, PATHS["lineage"], ".node")
    browser.find(".node.fold text", "6 alike")
    browser.script("document.querySelector('.node[tabindex=\"0\"]').focus()")
    assert "quality 0.5" in browser.has_focus()
    browser.press(Keys.ARROW_RIGHT)
    assert "quality NaN" in browser.has_focus()
    browser.press(Keys.ARROW_RIGHT)
    eventually(lambda: "6 alike" in browser.has_focus(), "the fold has the focus")
    browser.press(Keys.ENTER)
    browser.find(".node.version", "leaf-5@1")
    assert "open=" in browser.driver.current_url
    browser.driver.back()
    browser.find(".node.fold text", "6 alike")
    browser.press("/")
    browser.press("leaf-2")
    browser.find(".found a", "leaf-2@1").click()
    browser.find("aside h2", "leaf-2@1")
    for colour in ("age", "bytes", "quality"):
        browser.script("const s = document.getElementById('colour'); s.value = arguments[0];"
                       "s.dispatchEvent(new Event('change'))", colour)  # fmt: skip
    assert browser.errors() == []


@pytest.mark.parametrize("name", PATHS)
def test_hostile_names_and_metadata_are_text(browser: Browser, page: Served, name: str) -> None:
    browser.open(page, PATHS[name])
    if name == "compare":
        browser.find(".layers")
    if name == "version":
        assert "The first 20,000 of" in browser.find("section[aria-label=Metadata]").text
        assert HTML in browser.find("pre").text
        assert HTML in browser.find("section[aria-label=Layers]").text
    assert browser.script("return window.pwned") is None
    assert browser.driver.find_elements("css selector", "img, #page script, iframe, object") == []
    assert browser.errors() == []


def test_the_policy_stops_a_script_that_would_get_into_a_page(browser: Browser, page: Served) -> None:
    browser.open(page)
    browser.script("const d = document.createElement('div'); d.innerHTML = arguments[0]; document.body.append(d)", HTML)
    eventually(lambda: any("Content Security Policy" in error for error in browser.errors()), "it is reported")
    assert browser.script("return window.pwned") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PATHS)
def test_axe_finds_nothing_serious(browser: Browser, page: Served, name: str, scheme: str) -> None:
    browser.scheme(scheme)
    browser.open(page, PATHS[name])
    browser.find({"compare": ".layers", "lineage": ".node", "now": "section"}.get(name, "#page *"))
    assert browser.serious() == []


@pytest.mark.parametrize("name", PATHS)
def test_a_narrow_screen_needs_no_scrolling_sideways(browser: Browser, page: Served, name: str) -> None:
    browser.resize(400)
    browser.open(page, PATHS[name])
    browser.find({"compare": ".layers", "lineage": ".node", "now": "section"}.get(name, "#page *"))
    assert browser.script("return document.documentElement.scrollWidth") <= 400


def test_a_wrong_token_is_refused_and_the_right_one_opens_the_page(browser: Browser, page: Served) -> None:
    browser.driver.get(f"{page.url}/compare?token=wrong")
    assert "This is not the token" in browser.find("[role=alert]").text
    browser.find("input[type=password]").send_keys("another-wrong-token", Keys.ENTER)
    browser.find("[role=alert]")
    assert browser.serious() == []
    browser.find("input[type=password]").send_keys(TOKEN, Keys.ENTER)
    browser.find("section", "Nodes and shards")
    assert TOKEN not in browser.driver.current_url
    assert TOKEN not in browser.script("return document.cookie")


def test_a_version_is_retired_after_a_dialog_that_names_it(browser: Browser, page: Served, repo: Repository) -> None:
    repo.save("doomed", {"w": np.zeros(4)})
    browser.open(page, "changes?ref=doomed@1", "#ref")
    button = browser.find("form button", "Retire")
    button.click()
    assert "doomed@1" in browser.find("dialog").text
    browser.press(Keys.ESCAPE)
    eventually(lambda: not browser.driver.find_elements("css selector", "dialog"), "the dialog is closed")
    assert repo.models("doomed")
    button.click()
    browser.find("dialog button.danger", "Retire doomed@1").click()
    browser.find("#state", "doomed@1 is retired")
    assert not repo.models("doomed")
    assert browser.errors() == []


def test_a_change_is_refused_where_none_is_allowed(browser: Browser, repo: Repository) -> None:
    with served(repo) as page:
        browser.open(page, "changes")
        assert "Changes are not allowed" in browser.find("[role=alert]").text
        body = '{"ref": "leaf-0@1", "confirm": "leaf-0@1"}'
        asked = """return fetch('api/retire', {method: 'POST', body: arguments[0],
            headers: {'Content-Type': 'application/json'}}).then((answer) => answer.status)"""
        assert browser.script(asked, body) == 403
    assert repo.models("leaf-0")


def test_a_page_of_another_origin_changes_nothing(browser: Browser, repo: Repository) -> None:
    seen: list[tuple[bool, int]] = []

    def recorded(app: Starlette) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def sent(message: Message) -> None:
                if message["type"] == "http.response.start" and scope["path"] == "/api/retire":
                    seen.append((b"cookie" in dict(scope["headers"]), message["status"]))
                await send(message)

            await app(scope, receive, sent)

        return answer

    async def evil(_: Request) -> Response:
        return HTMLResponse("<title>evil</title>")

    code = """return fetch(arguments[0], {method: 'POST', mode: 'no-cors', credentials: 'include',
        headers: {'Content-Type': 'text/plain'}, body: '{"ref": "leaf-0@1", "confirm": "leaf-0@1"}'})
        .then(() => 'read', () => 'unread')"""
    with served(repo, allow_changes=True, wrap=recorded) as page, listening("127.0.0.1", 0) as listener:
        browser.open(page)
        with serving(Server(Starlette(routes=[Route("/", evil)]), lambda: None), listener):
            browser.driver.get(f"http://127.0.0.1:{listener.getsockname()[1]}/")  # the same host
            assert browser.driver.title == "evil"
            assert browser.script(code, f"{page.url}/api/retire") == "unread"
    assert seen == [(True, 403)]  # the cookie was sent along
    assert repo.models("leaf-0")


def test_a_shard_that_is_killed_while_somebody_looks_on(browser: Browser, repository: Repository) -> None:
    repository.save("m", {"w": np.zeros(4)})
    with served(repository) as page:
        browser.open(page)
        browser.find("td a", "m@1")
        browser.script("window.same = true")
        kill_shard(repository, 0)
        eventually(lambda: "m@1" not in browser.text(), "the lost version is no longer shown")
        repository.save("after", {"w": np.zeros(4)})
        browser.find("td a", "after@1")
        assert browser.script("return window.same")


def test_a_repository_that_goes_and_comes_back(browser: Browser, cluster: Engine) -> None:
    with Repository.start("web-again", shards=1, preallocate_bytes=0) as first, served(first) as page:
        browser.open(page)
        browser.find("section", "Nodes and shards")
        first.stop()
        browser.find("#state.bad", "does not answer")
        with Repository.start("web-again", shards=1, preallocate_bytes=0) as second:
            second.save("again", {"w": np.zeros(4)})
            browser.find("td a", "again@1")


def test_it_works_below_a_prefix(browser: Browser, repo: Repository) -> None:
    def below(app: Starlette) -> Starlette:
        return Starlette(routes=[Mount("/deep/prefix", app)], lifespan=lambda _: app.router.lifespan_context(app))

    with served(repo, wrap=below) as page:
        for path, ready in (("", "section"), (PATHS["compare"], ".layers"), (PATHS["lineage"], ".node")):
            browser.open(page, f"deep/prefix/{path}", ready)
        browser.find("nav a", "Now").click()
        browser.find("section", "Nodes and shards")
        assert browser.driver.current_url == f"{page.url}/deep/prefix/"
        assert browser.errors() == []
