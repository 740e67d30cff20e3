"""The benchmark of failover on real brokers: one round, and what it says of it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from bench import network

ROOT = Path(__file__).parents[2]


async def benched(*options: str) -> tuple[int, dict[str, object], str]:
    command = (sys.executable, "-m", "bench.failover", "--rounds", "1", "-o", "json", *options)
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(240):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    return process.returncode or 0, json.loads(out), err.decode()


@pytest.mark.parametrize(
    "fault",
    [
        "kill-follower",
        pytest.param(
            "cut",
            marks=pytest.mark.skipif(not network.is_possible(), reason="network namespaces need root"),
        ),
    ],
)
async def test_a_round_is_measured_and_nothing_is_lost(tmp_path: Path, fault: str) -> None:
    kept = tmp_path / "rounds.jsonl"
    options = ("--fault", fault, "--system", "sava", "--dir", str(tmp_path), "--resume", str(kept))
    code, report, err = await benched(*options)
    assert (code, report["faults"]) == (0, []), err
    measured, read_back = map(json.loads, kept.read_text().splitlines())
    assert len(measured["owned"]) >= 2
    assert len(measured["owned"]) + len(measured["others"]) == 6
    assert not measured["gave_up"]
    # Nothing answers for the victim's topics at once: a gap of none would mean that nothing was broken.
    assert min(measured["owned"]) > 0.2
    assert read_back["acked"] > 100
    assert (read_back["lost"], read_back["doubled"]) == (0, 0)
    # The second run finds its rounds in the file and starts no broker.
    _, again, _ = await benched(*options)
    assert again["rows"] == report["rows"]
    assert len(kept.read_text().splitlines()) == 2
