"""Pictures of the console for README and docs, of a real cluster with real traffic: ``make screenshots``.

Starts three brokers on loopback with a temporary directory, lets producers and consumers work for a while,
and lets Chromium take a picture of each page, light and dark.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Final

from selenium import webdriver

from sava.client import Client

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"
PORT: Final = 23_700
TRAFFIC_S: Final = 90.0
SETTLE_S: Final = 4.0
CITIES: Final = ("Belgrade", "Zagreb", "Ljubljana", "Sarajevo", "Novi Sad")
PAGES: Final = {
    "overview": "",
    "topics": "topics",
    "topic": "topics/default/orders-part-0",
    "messages": "topics/default/orders/messages",
    "subscriptions": "topics/default/orders/subscriptions",
    "brokers": "brokers",
}


async def traffic(url: str) -> None:
    rng = random.Random(7)
    async with Client(url) as client:
        orders = client.producer("/default/orders", partitions=3)
        payments = client.producer("/default/payments")
        async with orders, payments:
            consumers = [
                asyncio.create_task(consume(client, "billing", 0.0)),
                asyncio.create_task(consume(client, "reports", 0.02)),
            ]
            end = time.monotonic() + TRAFFIC_S
            number = 0
            while time.monotonic() < end:
                for _ in range(rng.randrange(5, 40)):
                    body = {
                        "order": number,
                        "city": rng.choice(CITIES),
                        "total": round(rng.uniform(1, 90), 2),
                    }
                    orders.send(
                        json.dumps(body).encode(),
                        key=f"customer-{rng.randrange(500)}",
                        attributes={"region": rng.choice(("eu", "us"))},
                    )
                    number += 1
                payments.send(b"payment %d" % number)
                await asyncio.sleep(0.1)
            for consumer in consumers:
                consumer.cancel()
            await asyncio.gather(*consumers, return_exceptions=True)


async def consume(client: Client, subscription: str, pause_s: float) -> None:
    options = {"subscription": subscription, "type": "shared", "start": "earliest"}
    async with client.consumer("/default/orders", **options) as consumer:  # type: ignore[arg-type]  # literals all
        async for message in consumer:
            await asyncio.sleep(pause_s)
            await consumer.ack(message)


def browser() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for each in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(each)
    options.add_argument("--window-size=1280,860")
    return webdriver.Chrome(options, webdriver.ChromeService(executable_path=shutil.which("chromedriver")))


def wait_until_ready(url: str) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}readyz", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"{url} is not ready")


def take(url: str) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    driver = browser()
    try:
        for theme in ("light", "dark"):
            driver.get(url)
            driver.execute_script(f"localStorage.setItem('sava.theme', '{theme}')")
            for name, place in PAGES.items():
                driver.get("about:blank")
                driver.get(f"{url}#/{place}")
                time.sleep(SETTLE_S)
                driver.save_screenshot(str(IMAGES / f"console-{name}-{theme}.png"))
    finally:
        driver.quit()


def main() -> int:
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        sys.stderr.write(
            "Chromium and its driver are needed (Debian: apt-get install chromium chromium-driver)\n"
        )
        return 1
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "sava.cli", "up", "--brokers", "3", "--port-base", str(PORT)]
        cluster = subprocess.Popen([*command, "--data-dir", directory], stdout=subprocess.DEVNULL)
        try:
            wait_until_ready(f"http://127.0.0.1:{PORT + 3}/")
            time.sleep(2)
            asyncio.run(traffic(f"http://127.0.0.1:{PORT}"))
            take(f"http://127.0.0.1:{PORT + 3}/")
        finally:
            cluster.send_signal(signal.SIGINT)
            cluster.wait(timeout=60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
