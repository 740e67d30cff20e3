"""What the documentation names is there, and no block of it is left out.

* Blocks marked ``sh`` are run: all of a page as one session, from its top to its end (``session`` of
  ``tests/integration/test_docs.py``).
* Blocks marked ``python`` are run by the tests that ``PYTHON`` names, those in other languages by ``OTHERS``.
* Blocks without a mark are pictures and timelines. Commands in them cannot be run as they stand, because they
  name other machines or take hours: ``ELSEWHERE`` has each, with what runs the like of it, and they are at
  least taken apart as their program would.
* Commands between backticks, in pages and in the program's own messages, exist, with the options they are
  shown with. So do settings, metrics, targets of ``make``, files and anchors that are named.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main

from bench.__main__ import _parser as bench_parser
from sava.cli.main import tree
from sava.config import Config
from tests.support.pages import (
    CONTRIBUTING,
    DOCS,
    PAGES,
    README,
    ROOT,
    all_blocks,
    anchors_of,
    blocks,
    prose_of,
    text_of,
)
from tests.unit.config.test_configuration_page import keys
from tools.reference.cli import walk

PYTHON: Final = {
    README: ("tests/integration/test_docs.py", "tests/spark/test_pipeline_guide.py"),
    "client.md": ("tests/integration/test_client_guide.py",),
    "danube.md": ("tests/compat/test_examples.py",),
    "pipeline.md": ("tests/spark/test_pipeline_guide.py",),
    "security.md": ("tests/integration/test_docs.py",),
}
"""Which tests run the Python of a page."""
SHELL: Final = {
    "http-api.md": ("tests/unit/console/test_http_api.py",),
    "client.md": ("tests/integration/test_client_guide.py",),
    "pipeline.md": ("tests/spark/test_pipeline_guide.py",),
}
"""And its commands, if that is not done by ``session``."""
OTHERS: Final = {
    ("configuration.md", "yaml"): "tests/integration/test_docs.py",
    ("install.md", "ini"): "tests/integration/test_docs.py",
}
"""And what is written in other languages."""

SECRETS: Final = "tests/spark/test_replication_tls.py, in a directory of its own"
INSTALLED: Final = "the Makefile and CI install so; a test would need a package index"
SERVICE: Final = "changes the machine; tests/integration/test_docs.py has the unit checked"
ELSEWHERE: Final = {
    README: {
        "make demo": "tests/integration/test_demo.py",
        "make test": "whoever runs this",
    },
    CONTRIBUTING: {
        "make setup": INSTALLED,
        "make lint": "whoever makes a change",
        "make test": "whoever runs this",
        "make sim SEEDS=2000": "tests/integration/test_docs.py, with fewer seeds",
        "make mutants": "tests/integration/test_docs.py, two of them",
        "make docs": "tests/integration/test_reference.py",
    },
    "benchmarks.md": {
        "make bench": "takes an hour; tests/unit/test_bench_page.py",
        ".venv/bin/python -m bench --quick": "takes minutes",
        ".venv/bin/python -m bench --only puts": "takes minutes",
        ".venv/bin/python -m bench --only puts --write": "takes minutes; tests/unit/test_bench_page.py",
        ".venv/bin/python -m bench.failover --rounds 20 --fault stop,cut --resume rounds.jsonl": (
            "takes minutes; tests/cluster/test_bench_failover.py"
        ),
        ".venv/bin/python -m bench -o json": "takes an hour",
        ".venv/bin/python -m bench --out run.json": "takes an hour",
        ".venv/bin/python -m bench --dir /mnt/disk": "takes an hour",
    },
    "client.md": {"sava broker --standalone": "tests/support/brokers.py, on ports of its own"},
    "http-api.md": {"sava broker --standalone": "tests/support/brokers.py, on ports of its own"},
    "configuration.md": {
        "sava broker --config /etc/sava/sava.yml": "tests/integration/test_docs.py, with its file elsewhere"
    },
    "install.md": {
        "python3 -m venv /opt/sava": INSTALLED,
        "/opt/sava/bin/pip install --require-hashes --requirement requirements/build.lock": INSTALLED,
        "/opt/sava/bin/pip install --require-hashes --requirement requirements/run.lock": INSTALLED,
        "/opt/sava/bin/pip install --require-hashes --no-build-isolation --requirement "
        "requirements/spark.lock": INSTALLED,
        "/opt/sava/bin/pip install --no-deps --no-build-isolation .": INSTALLED,
        "ln -s /opt/sava/bin/sava /usr/local/bin/sava": INSTALLED,
        "sava cluster init --nodes a:7650,b:7650,c:7650 --admin a:50051": "operations.md, on one machine",
        "sava wait --admin b:50051": "other pages, on one machine",
        "useradd --system --home-dir /var/lib/sava --shell /usr/sbin/nologin sava": SERVICE,
        "install -D --mode 644 sava.yml /etc/sava/sava.yml": SERVICE,
        "install --mode 644 deploy/systemd/sava.service /etc/systemd/system/sava.service": SERVICE,
        "systemctl daemon-reload": SERVICE,
        "systemctl enable --now sava": SERVICE,
        "journalctl --unit sava --lines 20": SERVICE,
    },
    "operations.md": {"sava up": "tests/integration/test_up.py, and the tour of the README"},
    "pipeline.md": {
        "pip install --constraint constraints.txt '.[spark]'": INSTALLED,
        "sava spark shell": "tests/unit/pipeline/test_launch.py; a shell waits for somebody",
        "sava spark submit --master spark://master:7077 --service broker:6650 program.py": (
            "tests/spark/test_standalone.py"
        ),
    },
    "replication.md": {
        "install -m 600 west.token /etc/sava/secrets/west.token": SECRETS,
        "sava remotes add west --service https://west.example.org:6650 --token-file west.token "
        "--tls-ca west-ca.pem": SECRETS,
        "sava pipelines run --secrets-dir /etc/sava/secrets": SECRETS,
    },
    "pipelines.md": {
        "sava pipelines run --admin 10.0.0.1:50051,10.0.0.2:50051 --master 'local[*]' "
        "--checkpoints /shared/checkpoints --python-path /shared/functions --allow-function 'shop.*' "
        "--allow-format parquet --allow-path s3a://lake/orders": "tests/spark/test_runner.py",
    },
}
"""Commands of blocks without a mark, by page, each with what runs the like of it, or why nothing can."""

PROGRAMS: Final = (
    r"(?:sava|make|python3?|pip|apt-get|ln|echo|cat|curl|export|cd|kill|seq|until|for|useradd|install"
    r"|systemctl|journalctl|\S*/bin/\w+) "
)
"""How a line begins that somebody might type."""


# -- nothing is left out --------------------------------------------------------------------------


@cache
def sources_of_tests() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("*.py")}


@cache
def pages_with_a_session() -> set[str]:
    called = re.compile(r"""\bsession\(\s*"([^"]+)\"""")
    return {page for source in sources_of_tests().values() for page in called.findall(source)}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_by_a_test(page: str) -> None:
    for language in {block.language for block in all_blocks(page)} - {""}:
        if language == "sh":
            assert page in pages_with_a_session() or page in SHELL, (
                f'the commands of {page} are not run: write session("{page}", …) in a test'
            )
        elif language == "python":
            assert page in PYTHON, f"the Python of {page} is not run: write a test, and name it in PYTHON"
        else:
            assert (page, language) in OTHERS, (
                f"the {language} of {page} is not run: name a test in OTHERS, or leave the mark away"
            )


def test_the_tests_that_run_pages_know_them() -> None:
    named = [(page, test) for page, tests in (*PYTHON.items(), *SHELL.items()) for test in tests]
    named += [(page, test) for (page, _), test in OTHERS.items()]
    for page, test in named:
        assert Path(page).name in sources_of_tests()[test], f"{test} does not know of {page}"


def unmarked_commands(page: str) -> list[str]:
    """Those of blocks that nothing runs, without what is said about them in the same line."""
    found = []
    for block in all_blocks(page):
        if block.language == "":
            lines = [line for line in block.lines if re.match(PROGRAMS, f"{line} ")]
            found += [re.split(r" {2,}| # ", line)[0].strip() for line in lines]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_a_command_that_nothing_runs_has_a_reason(page: str) -> None:
    commands = unmarked_commands(page)
    known = ELSEWHERE.get(page, {})
    assert [command for command in commands if command not in known] == [], (
        "mark the block with sh, so that it is run; or, if it cannot be, say in ELSEWHERE what runs the like"
    )
    assert [command for command in known if command not in commands] == [], "the page says this no more"
    for reason in known.values():
        for test in re.findall(r"tests/\S+\.py", reason):
            assert (ROOT / test).exists()


@pytest.mark.parametrize("page", PAGES)
def test_no_command_hides_in_an_indented_block(page: str) -> None:
    """Four spaces make a block too, and one that nothing looks at."""
    assert re.findall(rf"^(?: {{4}}|\t){PROGRAMS}.*$", prose_of(page), re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_loop_ends_also_when_the_page_is_repeated(page: str) -> None:
    """A command that creates is refused from the second time on, and its loop would wait for ever."""
    loops = re.findall(r"^until (sava [^;|]* create [^;]*);", text_of(page), re.MULTILINE)
    assert [loop for loop in loops if "--if-absent" not in loop] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_loop_waits_in_silence(page: str) -> None:
    """Whoever sees nothing cannot know that a broker has not started, or that its port is another program's:
    the loop of the tour waited for ever."""
    assert re.findall(r"^ *(?:until|while) .*(?:2> ?/dev/null|2>&1|&>).*$", text_of(page), re.MULTILINE) == []


# -- commands exist -------------------------------------------------------------------------------

COMMANDS: Final[Any] = typer.main.get_command(tree())
ELLIPSES: Final = ("…", "...")


def fault_of(text: str) -> str:
    """What is wrong with a command; empty if nothing is. Arguments are not looked at: in prose they are often
    left out."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return ""  # a piece of something else
    command = COMMANDS
    path = ["sava"]
    for word in words[1:]:
        inner = getattr(command, "commands", None)
        if inner is not None and not word.startswith("-"):
            if word in ELLIPSES or "|" in word or not re.fullmatch(r"[a-z-]+[,;]?", word):
                return ""
            if word not in inner:
                return f"there is no {' '.join((*path, word))}"
            command = inner[word]
            path.append(word)
        elif re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word):
            option = word.partition("=")[0]
            known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
            if option not in known | {"--help"}:
                return f"{' '.join(path)} has no option {option}"
        if word in ("|", "&&", ";", "&", ">", "2>", "||") or path[1:] == ["spark", "submit"]:
            break
    return ""


def refusal_of(command: str) -> str:
    """What the program would say to a whole command, before it does anything; empty if it would do it."""
    _, *words = shlex.split(command)
    inner = COMMANDS
    while (below := getattr(inner, "commands", None)) is not None:
        if not words or words[0] not in below:
            return f"there is no {command}"
        inner = below[words.pop(0)]
    inner = copy.copy(inner)
    inner.callback = lambda **_: None
    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit) as ended:
        inner.main(words, prog_name=inner.name)
    return said.getvalue() if ended.value.code else ""


def commands_in(page: str) -> Iterator[str]:
    """In blocks of any kind, and between backticks."""
    for block in all_blocks(page):
        for line in block.lines:
            yield from re.findall(r"^(?:until |while |seq [^|]*\| )?(sava [a-z][^\n;]*)", line)
    yield from re.findall(r"(?<!`)`(sava [a-z][^`\n]*)`(?!`)", prose_of(page))


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_a_page_names_exists(page: str) -> None:
    found = {command: fault_of(command) for command in commands_in(page)}
    assert {command: fault for command, fault in found.items() if fault} == {}


def test_every_command_that_a_message_of_the_program_names_exists() -> None:
    faults = {}
    for path in (ROOT / "src" / "sava").rglob("*.py"):
        source = re.sub(r"\"\n\s+f?\"", "", path.read_text())
        for command in re.findall(r"`(sava [a-z][^`\n]*)`", source):
            if fault := fault_of(command):
                faults[f"{path.name}: {command}"] = fault
    assert faults == {}


@pytest.mark.parametrize("page", ELSEWHERE)
def test_what_is_not_run_would_at_least_be_understood(page: str) -> None:
    faults = {}
    for command in ELSEWHERE[page]:
        if command.startswith("sava "):
            faults[command] = refusal_of(command)
        elif found := re.fullmatch(r"\.venv/bin/python -m bench(\.\w+)?(.*)", command):
            bench_parser().parse_args(shlex.split(found[2]))
            assert (ROOT / "bench" / f"{(found[1] or '.__main__')[1:]}.py").exists()
    assert {command: fault for command, fault in faults.items() if fault} == {}


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("sava topics create /default/orders --partitions 3", ""),
        ("sava topics …", ""),
        ("sava nothing", "there is no sava nothing"),
        ("sava topics invent /default/orders", "there is no sava topics invent"),
        ("sava topics create /default/orders --pieces 3", "sava topics create has no option --pieces"),
    ],
)
def test_wrong_commands_are_noticed(command: str, fault: str) -> None:
    assert fault_of(command) == fault


@pytest.mark.parametrize(
    ("command", "refusal"),
    [
        ("sava topics create /default/orders --partitions 3", ""),
        ("sava topics create /default/orders --partitions three", "--partitions"),
        ("sava topics create /default/orders --pieces 3", "--pieces"),
        ("sava topics create", "NAME"),
        ("sava subscriptions create /default/orders billing --type odd", "'odd' is not one of"),
        ("sava nothing", "there is no sava nothing"),
    ],
)
def test_wrong_arguments_are_noticed(command: str, refusal: str) -> None:
    assert refusal in refusal_of(command)
    assert bool(refusal_of(command)) == bool(refusal)


@pytest.mark.parametrize("page", PAGES)
def test_every_target_of_make_exists(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = re.findall(r"(?:^|`)make ((?:[a-z-]+(?=[ `\n]) ?)+)", text_of(page), re.MULTILINE)
    assert {target for words in named for target in words.split()} - targets == set()


def test_the_targets_of_make_can_be_made() -> None:
    made = subprocess.run(
        [
            "make",
            "--dry-run",
            "setup",
            "lint",
            "test",
            "test-long",
            "sim",
            "mutants",
            "torture",
            "soak",
            "bench",
            "demo",
            "docs",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr


# -- options, settings and metrics exist ----------------------------------------------------------

OF_OTHERS: Final = {
    "benchmarks.md": {
        *("--dir", "--fault", "--logs", "--out", "--quick", "--resume", "--rounds", "--system", "--write"),
    },
    "design/journal.md": {"--jobs", "--seed", "--seeds", "--trace"},
    "design/storage.md": {"--quick"},
    "diagnosis.md": {"--silent"},
    "http-api.md": {"--data-binary", "--json"},
    "operations.md": {"--fail", "--silent"},
    "install.md": {
        *("--require-hashes", "--requirement", "--no-build-isolation", "--no-deps"),
        *("--constraint", "--system", "--home-dir", "--shell", "--mode", "--now", "--unit", "--lines"),
    },
    "pipeline.md": {"--constraint", "--once", "--py-files"},
    "testing.md": {
        *("--days", "--jobs", "--list", "--seed", "--seeds", "--shrink", "--trace"),
        *("--doubles", "--faults", "--growth", "--minutes", "--no-spark", "--report", "--secure", "--spark"),
    },
}
"""Options of other programs."""
OF_DANUBE: Final = {"danube.md": {"storage.mode", "storage.durable", "meta_store.seed_nodes"}}
"""Settings of another program."""


@pytest.mark.parametrize("page", PAGES)
def test_every_option_that_a_page_names_exists(page: str) -> None:
    known = {
        name
        for _, command in walk(COMMANDS, "sava")
        for each in command.params
        for name in (*each.opts, *each.secondary_opts)
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text_of(page)))
    assert sorted(named - known - {"--help", "--version"} - OF_OTHERS.get(page, set())) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_that_a_page_names_exists(page: str) -> None:
    known = keys(Config)
    sections = {key.partition(".")[0] for key in known}
    named = {
        name
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:: [^`]*)?`", text_of(page))
        if name.partition(".")[0] in sections and not name.endswith((".md", ".py", ".proto", ".yml"))
    }
    assert sorted(named - known - OF_DANUBE.get(page, set())) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_metric_that_a_page_names_exists(page: str) -> None:
    known = set(re.findall(r"^\| `(\w+)`", text_of("reference/metrics.md"), re.MULTILINE))
    named = set(re.findall(r"\b(?:sava|pulsar)_[a-z_]+[a-z]\b", text_of(page)))
    assert (
        sorted(name for name in named - known if re.sub("_(bucket|sum|count)$", "", name) not in known) == []
    )


# -- links ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    lost = []
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)]*))?\)", prose_of(page)):
        path = ((DOCS / page).parent / target).resolve() if target else (DOCS / page).resolve()
        if not path.exists():
            lost.append(target)
        elif anchor and anchor not in anchors_of(os.path.relpath(path, DOCS)):
            lost.append(f"{target}#{anchor}")
    assert lost == []


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_are_in_the_repository(page: str) -> None:
    named = re.findall(r"`((?:docs|src|tests|examples|deploy|tools|bench)/[\w./-]+)`", prose_of(page))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_pages_have_blocks() -> None:
    """Otherwise nothing above has looked at any."""
    assert len(blocks(README, "sh")) > 4
    assert len(blocks("client.md", "python")) > 8
    assert "a-tour-of-five-minutes" in anchors_of(README)
