"""Ten thousand versions in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tensorvine.actors import Repository
from tensorvine.clusters.web.lineage import MOST

from tests.support.browser import Browser, Keys, chromium
from tests.support.waiting import eventually
from tests.support.web import served

MANY = 10_000
CLIENTS = 4


@pytest.fixture
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.mark.timeout(900)
def test_lineage_of_ten_thousand_versions(browser: Browser, repository: Repository) -> None:
    repository.save("root", {"w": np.zeros(4, np.float32)})

    def save(client: int) -> None:
        with Repository.connect(repository.name, engine=repository.engine) as repo:
            for n in range(client, MANY - 1, CLIENTS):
                parent = "root@1" if n < 100 * CLIENTS else f"nas/c-{client + (n // 7) // CLIENTS * CLIENTS}@1"
                repo.save(f"nas/c-{n}", {"w": np.full(4, n, np.float32)}, parent=parent, quality=n / MANY)

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(save, range(CLIENTS)))
    with served(repository) as page:
        browser.open(page)
        browser.find(".tile", "10,000")
        browser.open(page, "lineage", ".node")
        browser.find("#state", "10,000 versions")
        nodes = browser.driver.find_elements("css selector", ".node")
        assert len(nodes) <= MOST
        assert sum("fold" in (node.get_attribute("class") or "") for node in nodes) > 0
        browser.press("/", "c-9876")
        browser.find(".found a", "nas/c-9876@1").click()
        browser.find("aside h2", "nas/c-9876@1")
        browser.script("document.querySelector('.node.chosen').focus()")
        browser.press(Keys.ARROW_LEFT)
        eventually(lambda: "nas/c-" in browser.has_focus(), "its parent has the focus")
        browser.open(page, "version?ref=root@1")
        browser.find("section[aria-label=Descendants]", "9,959 more")
        assert browser.errors() == []
