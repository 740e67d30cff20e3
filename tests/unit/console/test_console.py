"""The console in a real browser: Chromium, driven by Selenium. Without one these tests are skipped; Debian
has it (apt-get install chromium chromium-driver)."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from sava.client.blocking import Client
from tests.security.secured import Issuer
from tests.support.brokers import Standalone

AXE: Final = Path(__file__).parents[2] / "support" / "axe" / "axe.min.js"
PATIENCE_S: Final = 60
PAGES: Final = {
    "": "Overview",
    "topics": "Topics",
    "topics/default/orders": "/default/orders",
    "topics/default/orders/messages": "/default/orders",
    "topics/default/orders/subscriptions": "/default/orders",
    "topics/default/orders/settings": "/default/orders",
    "schemas": "Schemas",
    "replication": "Replication",
    "pipelines": "Pipelines",
    "brokers": "Brokers",
    "metadata": "Metadata",
    "security": "Security",
}

pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="needs Chromium and its driver (Debian: apt-get install chromium chromium-driver)",
)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with Standalone(tmp_path_factory.mktemp("broker")) as running:
        running.ready()
        with Client(running.url) as client:
            with client.producer("/default/orders", partitions=3) as producer:
                for number in range(60):
                    body = json.dumps({"order": number, "city": "Belgrade"}).encode()
                    producer.send(body, key=f"customer-{number % 7}", attributes={"region": "eu"})
            with client.producer("/default/payments") as producer:
                producer.send_many([b"payment %d" % number for number in range(200)])
            with client.consumer("/default/payments", subscription="ledger", start="earliest") as consumer:
                batch = consumer.receive_batch(50, timeout=30)
                assert batch is not None
                consumer.ack(batch)
                consumer.flush()
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    profile = tmp_path_factory.mktemp("profile")
    for each in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(each)
    options.add_argument(f"--user-data-dir={profile}")
    options.add_argument("--window-size=1280,900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.set_page_load_timeout(PATIENCE_S)
        yield driver
    finally:
        driver.quit()


class Page:
    """The console as a person sees it."""

    def __init__(self, browser: webdriver.Chrome, broker: Standalone) -> None:
        self.browser = browser
        self.url = f"http://127.0.0.1:{broker.http_port}/"

    def open(self, place: str = "") -> None:
        self.browser.get("about:blank")
        self.browser.get(f"{self.url}#/{place}")

    def shows(self, text: str) -> None:
        wait: Any = WebDriverWait(self.browser, PATIENCE_S)
        wait.until(lambda _: text in self.text, f"{text!r} is not in: {self.text[:2000]}")

    @property
    def text(self) -> str:
        return str(self.browser.execute_script("return document.body.innerText"))

    def find(self, selector: str) -> WebElement:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def button(self, label: str) -> WebElement:
        return self.browser.find_element(By.XPATH, f"//button[normalize-space()='{label}']")

    def complaints(self) -> list[str]:
        """Errors of scripts, and what the policy of the page has refused."""
        return [
            entry["message"]
            for entry in self.browser.get_log("browser")
            if entry["level"] == "SEVERE" and "favicon" not in entry["message"]
        ]


@pytest.fixture
def page(browser: webdriver.Chrome, broker: Standalone) -> Page:
    browser.get_log("browser")
    return Page(browser, broker)


@pytest.mark.parametrize(("place", "heading"), PAGES.items())
def test_every_page_shows_itself_without_an_error(page: Page, place: str, heading: str) -> None:
    page.open(place)
    page.shows(heading)
    assert page.find("h1").text.startswith(heading)
    complaints = [each for each in page.complaints() if "/v1/auth/" not in each]
    assert complaints == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("place", PAGES)
def test_every_page_can_be_used_by_everybody(page: Page, place: str, theme: str) -> None:
    """Contrast, names of controls, order of headings: the rules of WCAG 2.1 AA, by axe-core."""
    page.open(place)
    page.browser.execute_script(f"localStorage.setItem('sava.theme', '{theme}')")
    page.open(place)
    page.shows(PAGES[place])
    page.browser.execute_script(AXE.read_text())
    found = page.browser.execute_async_script(
        "const done = arguments[0]; axe.run({runOnly: ['wcag2a', 'wcag2aa', 'wcag21aa']})"
        ".then((found) => done(found.violations.map((v) => [v.id, v.nodes.map((n) => n.html).slice(0, 3)])))"
    )
    assert found == []


def test_messages_are_shown_filtered_and_opened(page: Page) -> None:
    page.open("topics/default/orders/messages")
    page.shows("customer-3")
    page.find("input[name=key]").send_keys("customer-5")
    page.button("Read").click()
    page.shows("8 of")
    assert "customer-3" not in page.text
    page.find("details.message summary").click()
    page.shows('"city": "Belgrade"')
    page.shows("region")
    page.button("hex").click()
    page.shows("00000000")


def test_a_message_is_published_from_the_page(page: Page) -> None:
    page.open("topics/default/payments/messages")
    page.shows("payment 199")
    page.browser.execute_script("document.querySelectorAll('details.panel')[0].open = true")
    page.find("textarea[name=payload]").send_keys("from a person")
    page.button("Publish").click()
    page.shows("Stored at offset")
    page.shows("from a person")


def test_a_follower_sees_what_comes(page: Page, broker: Standalone) -> None:
    page.open("topics/default/orders/messages")
    page.shows("customer-3")
    page.button("Live").click()
    page.shows("Waiting for messages")
    with Client(broker.url) as client, client.producer("/default/orders") as producer:
        for number in range(50):  # until it follows each partition
            producer.send(b"live and well", key=f"k{number}")
            if "live and well" in page.text:
                break
    page.shows("live and well")
    page.button("Stop").click()


def test_a_slow_subscription_says_why(page: Page) -> None:
    page.open("topics/default/payments/subscriptions")
    page.shows("ledger")
    page.button("ledger").click()
    page.shows("No consumer is connected.")


def test_a_topic_is_made_and_deleted(page: Page) -> None:
    page.open("topics")
    page.shows("/default/payments")
    page.button("New topic").click()
    page.find("input[name=name]").send_keys("/default/passing")
    page.button("Create").click()
    page.shows("/default/passing")
    page.open("topics/default/passing/settings")
    page.shows("Delete the topic")
    page.button("Delete the topic").click()
    page.shows("cannot be taken back")
    page.find("dialog[open] button.primary").click()
    wait: Any = WebDriverWait(page.browser, PATIENCE_S)
    wait.until(lambda _: page.browser.current_url.endswith("#/topics"))


def test_a_search_finds_its_topics(page: Page) -> None:
    page.open("topics")
    page.shows("/default/payments")
    page.find("input[type=search]").send_keys("pay")
    wait: Any = WebDriverWait(page.browser, PATIENCE_S)
    wait.until(lambda _: "/default/orders" not in page.text)
    assert "/default/payments" in page.text


def test_it_fits_a_phone(page: Page) -> None:
    page.browser.set_window_size(400, 800)
    try:
        for place, heading in PAGES.items():
            page.open(place)
            page.shows(heading)
            script = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
            whole, shown = page.browser.execute_script(script)
            assert whole <= shown + 1, place
    finally:
        page.browser.set_window_size(1280, 900)


def test_the_files_are_small() -> None:
    static = Path(__file__).parents[3] / "src" / "sava" / "console" / "static"
    files = [path for path in static.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 400_000
    lines = sum(len(path.read_text().splitlines()) for path in files if path.parent == static)
    assert lines < 6_000


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Standalone, Issuer]]:
    directory = tmp_path_factory.mktemp("secured")
    issuer = Issuer(directory)
    settings = {
        "SAVA__AUTH__TOKENS": json.dumps([issuer.settings.model_dump(mode="json")]),
        "SAVA__AUTH__SUPER_ADMINS": '["user:root"]',
    }
    with Standalone(directory, **settings) as running:
        until_ready(f"http://127.0.0.1:{running.http_port}/readyz")
        yield running, issuer


def until_ready(url: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert time.monotonic() < end, f"{url} is not ready"
            time.sleep(0.1)


def log_in(page: Page, token: str) -> None:
    page.browser.get("about:blank")
    page.browser.get(page.url)
    page.browser.execute_script("sessionStorage.clear()")
    page.browser.get("about:blank")
    page.browser.get(page.url)
    page.shows("Log in to Sava")
    page.find("textarea[name=token]").send_keys(token)
    page.button("Log in").click()


def test_a_secured_cluster_wants_a_token(
    browser: webdriver.Chrome, secured: tuple[Standalone, Issuer]
) -> None:
    broker, issuer = secured
    page = Page(browser, broker)
    log_in(page, "not a token")
    page.shows("token")
    assert "Log in to Sava" in page.text
    log_in(page, issuer.token("user:root"))
    page.shows("user:root")
    page.shows("All is well")
    page.open("security")
    page.shows("super administrator")


def test_what_a_caller_may_not_do_is_refused(
    browser: webdriver.Chrome, secured: tuple[Standalone, Issuer]
) -> None:
    broker, issuer = secured
    page = Page(browser, broker)
    log_in(page, issuer.token("user:bob"))
    page.shows("user:bob")
    page.open("topics")
    page.shows("New topic")
    page.button("New topic").click()
    page.find("input[name=name]").send_keys("/default/mine")
    page.button("Create").click()
    page.shows("user:bob has no permission manage-topic")
