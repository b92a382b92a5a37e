"""Who may see a page: hosts, tokens, cookies, and where a change may come from. No repository is asked."""

from __future__ import annotations

import logging

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.testclient import TestClient
from tensorvine.clusters.web import pages
from tensorvine.clusters.web.access import Access, Gate
from tensorvine.store.errors import OptionError

TOKEN = "0123456789abcdef"  # noqa: S105
ACCESS = Access.of(TOKEN, ["testserver", "web.example"], 8765)


def application() -> Starlette:
    async def answer(request: Request) -> Response:
        return PlainTextResponse(f"seen {request.url.query}")

    async def change(request: Request) -> Response:
        return PlainTextResponse("changed" if ACCESS.may_change(request) else "refused")

    paths = ("/", "/compare", "/api/now", "/metrics", "/static/page.css")
    routes = [*(Route(path, answer) for path in paths), Route("/change", change, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(Gate, access=ACCESS)])


@pytest.fixture
def client() -> TestClient:
    return TestClient(application(), follow_redirects=False)


class TestToken:
    @pytest.mark.parametrize("path", ["/", "/compare", "/api/now", "/metrics"])
    def test_nothing_is_shown_without_it(self, client: TestClient, path: str) -> None:
        answer = client.get(path)
        assert answer.status_code == 401
        assert "seen" not in answer.text

    def test_scripts_and_styles_need_none(self, client: TestClient) -> None:
        assert client.get("/static/page.css").status_code == 200

    def test_it_is_swapped_for_a_cookie_that_does_not_hold_it(self, client: TestClient) -> None:
        answer = client.get(f"/compare?a=m%401&token={TOKEN}&b=x")
        assert (answer.status_code, answer.headers["location"]) == (303, "compare?a=m%401&b=x")
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith("tensorvine-8765=")
        assert "httponly" in cookie.lower()
        assert "samesite=strict" in cookie.lower()
        assert TOKEN not in cookie
        assert client.get("/compare?a=m").text == "seen a=m"

    def test_the_form_takes_it(self, client: TestClient) -> None:
        assert client.post("/login", data={"token": "no"}).status_code == 401
        assert "This is not the token" in client.post("/login", data={"token": "no"}).text
        assert client.post("/login", data={"token": TOKEN}).headers["location"] == "./"
        assert client.get("/").status_code == 200
        assert client.post("/login", content=b"x" * 10_000).status_code == 413

    @pytest.mark.parametrize("path", ["/api/now", "/metrics"])
    def test_programs_send_it_as_bearer(self, client: TestClient, path: str) -> None:
        assert client.get(path, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert client.get(path, headers={"Authorization": f"Bearer {TOKEN}x"}).status_code == 401
        assert client.get(path, headers={"Authorization": f"Basic {TOKEN}"}).status_code == 401

    def test_a_thousand_wrong_ones_are_refused_and_logged_once(
        self, client: TestClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            codes = {client.get(f"/?token={TOKEN[:-1]}{n}").status_code for n in range(500)}
            codes |= {
                client.post("/login", data={"token": f"\ud800{n}".encode("utf-8", "replace")}).status_code
                for n in range(500)
            }
        assert codes == {401}
        assert len([record for record in caplog.records if "wrong token" in record.message]) == 1
        assert client.get("/", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200

    @pytest.mark.parametrize("cookie", ["", TOKEN, "é", "0" * 64])
    def test_a_wrong_cookie_is_refused(self, client: TestClient, cookie: str) -> None:
        header = f"tensorvine-8765={cookie}".encode("latin-1")
        assert client.get("/", headers={b"Cookie": header}).status_code == 401

    @pytest.mark.parametrize("token", ["", "short", "a token with spaces", "ümlaut-ümlaut-ümlaut", "x" * 20 + "\n"])
    def test_a_bad_token_is_an_error_at_the_start(self, token: str) -> None:
        with pytest.raises(OptionError, match="at least 16 printable"):
            Access.of(token, [], 1)

    def test_drawn_tokens_differ(self) -> None:
        assert Access.of(None, [], 1).token != Access.of(None, [], 1).token


class TestHost:
    @pytest.mark.parametrize("host", ["localhost:9", "127.0.0.1:8765", "[::1]:1", "web.example", "WEB.example:443"])
    def test_known_hosts_are_answered(self, client: TestClient, host: str) -> None:
        assert client.get("/", headers={"Host": host}).status_code == 401

    @pytest.mark.parametrize(
        "host", ["evil.example", "", "192.0.2.7", "localhost.evil.example", "[::1", "web.example.", "a@"]
    )
    def test_others_are_refused_even_with_the_token(self, client: TestClient, host: str) -> None:
        answer = client.get("/", headers={"Host": host, "Authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 421


class TestChange:
    @pytest.mark.parametrize(
        ("headers", "said"),
        [
            ({}, "refused"),
            ({"Origin": "http://testserver"}, "changed"),
            ({"Origin": "http://testserver", "Sec-Fetch-Site": "same-origin"}, "changed"),
            ({"Origin": "http://testserver", "Sec-Fetch-Site": "same-site"}, "refused"),
            ({"Origin": "http://testserver", "Sec-Fetch-Site": "cross-site"}, "refused"),
            ({"Origin": "http://testserver:9999"}, "refused"),
            ({"Origin": "http://evil.example"}, "refused"),
            ({"Origin": "null"}, "refused"),
            ({"Origin": "https://web.example"}, "changed"),
            ({"Origin": "http://localhost"}, "refused"),
            ({"Authorization": f"Bearer {TOKEN}"}, "changed"),
            ({"Sec-Fetch-Site": "same-origin"}, "refused"),
        ],
    )
    def test_it_comes_from_a_page_of_the_server_or_shows_the_token(
        self, client: TestClient, headers: dict[str, str], said: str
    ) -> None:
        client.get(f"/?token={TOKEN}")
        assert client.post("/change", headers=headers).text == said


def test_every_answer_forbids_scripts_of_others(client: TestClient) -> None:
    for answer in (client.get("/"), client.get("/static/page.css"), client.get("/", headers={"Host": "evil"})):
        if answer.status_code != 421:
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["referrer-policy"] == "no-referrer"


def test_it_works_below_a_prefix() -> None:
    below = TestClient(Starlette(routes=[Mount("/a/prefix", application())]), follow_redirects=False)
    assert below.get("/a/prefix/api/now").status_code == 401
    assert below.get("/a/prefix/static/page.css").status_code == 200
    assert below.get(f"/a/prefix/?token={TOKEN}").headers["location"] == "./"
    assert below.get(f"/a/prefix/compare?token={TOKEN}").headers["location"] == "compare"
    assert below.get("/a/prefix/").status_code == 200


class TestPages:
    @pytest.mark.parametrize("name", pages.PAGES)
    def test_a_page_escapes_the_repository_and_has_no_script_of_its_own(self, name: str) -> None:
        text = pages.page(name, '<script>alert(1)</script>"&', changes=True)
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert text.count("<script") == text.count("<script src=") + text.count('<script type="module" src="static/')
        assert "style=" not in text
        assert " on" not in text.replace(" on ", "").partition("<body")[2].partition("<noscript")[0].replace(" one", "")

    def test_changes_are_listed_only_if_they_are_allowed(self) -> None:
        assert 'href="changes"' in pages.page("now", "m", changes=True)
        assert 'href="changes"' not in pages.page("now", "m", changes=False)

    @pytest.mark.parametrize("name", pages.PAGES)
    def test_addresses_are_relative(self, name: str) -> None:
        text = pages.page(name, "m", changes=True) + pages.login(wrong=False)
        assert 'href="/' not in text
        assert 'src="/' not in text
        assert "http" not in text
