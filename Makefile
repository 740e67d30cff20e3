# Every target sets up what it needs; a fresh clone needs Python 3.11 or newer and make.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
# The first that runs and is new enough. One that is found may still be a stand-in for none, as pyenv has them.
PYTHON ?= $(shell for each in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	$$each -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$each && break; done)
BIN := .venv/bin
READY := .venv/.ready
SEEDS ?= 2000
JOBS ?= 4

.PHONY: help setup lock sbom test test-long chaos torture soak attack test-spark lint sim mutants bench kafka nats demo docs house screenshots proto clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make setup    virtual environment in .venv with everything installed, by the hashes in requirements/
setup: $(READY)

PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Sources are built with what is locked too: pip's isolated builds would fetch any setuptools.
LOCKED = --require-hashes --no-build-isolation --requirement

$(READY): pyproject.toml $(wildcard requirements/*.lock)
	@"$(or $(PYTHON),python3)" -c '$(NEW_ENOUGH)' 2>/dev/null || { \
		echo "Python 3.11 or newer is needed, $(if $(PYTHON),which $(PYTHON) is not,and none is on the PATH); name one: make PYTHON=..."; exit 1; }
	@$(BIN)/python -c 'import pip; $(NEW_ENOUGH)' 2>/dev/null || "$(PYTHON)" -m venv --clear .venv
	@echo "installing into .venv ..."
	@$(PIP) $(LOCKED) requirements/build.lock
	@$(PIP) $(LOCKED) requirements/run.lock --requirement requirements/spark.lock --requirement requirements/dev.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@$(BIN)/python -m pip check --disable-pip-version-check >/dev/null || { \
		$(BIN)/python -m pip check; echo "constraints.txt lacks something that pyproject.toml needs; then: make lock"; exit 1; }
	@sh tools/java.sh $(BIN)/python
	@touch $@

## make lock     install what pyproject.toml asks for by constraints.txt, and write requirements/*.lock with its hashes
lock:
	@test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	@$(PIP) --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m tools.lock

## make sbom     what Sava consists of, as CycloneDX, in sbom.json
sbom: $(READY)
	$(BIN)/python -m tools.sbom > sbom.json

## make test     the default suite, in JOBS=4 processes: most of its time is waiting
test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder

## make test-long  the tests that are longer with SAVA_LONG=1 (200 SIGKILLs instead of 20)
test-long: $(READY)
	SAVA_LONG=1 $(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder $$(grep -rl --include='test_*.py' tests.support.long tests)

## make chaos    three brokers under load, at least 30 of them killed, paused, wiped or cut off; nothing acknowledged is lost
chaos: $(READY)
	SAVA_LONG=1 $(BIN)/python -m pytest -n 0 -s tests/cluster/test_chaos.py

## make torture  three brokers in namespaces of their own, a bad network, power losses, oracles: MINUTES=30 ARGS=--help
torture: $(READY)
	$(BIN)/python -m tests.torture --minutes $(or $(MINUTES),30) $(ARGS)

## make soak     steady load for MINUTES=60: memory, descriptors, threads, disk and metadata of brokers stay flat
soak: $(READY)
	$(BIN)/python -m tests.torture.soak --minutes $(or $(MINUTES),60) $(ARGS)

## make attack   three brokers attacked from outside while a client publishes: MINUTES=2 ARGS='--only raft'
attack: $(READY)
	$(BIN)/python -m tests.security.attack --minutes $(or $(MINUTES),2) $(ARGS)

## make test-spark  all tests with Spark, the long ones too: executors and drivers killed, a standalone cluster, Connect
test-spark: $(READY)
	SAVA_LONG=1 $(BIN)/python -m pytest tests/spark

## make lint     format, lint, types, import contracts, words, and whether the lock fits constraints.txt
lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tools.house --words
	$(BIN)/python -m tools.lock --check

## make sim      the deterministic simulator: SEEDS=2000 JOBS=4
sim: $(READY)
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --jobs $(JOBS)

## make mutants  break the code in known ways, one at a time, and see each break noticed
mutants: $(READY)
	$(BIN)/python -m tests.mutants --jobs $(JOBS)

## make bench    measure everything beside its peers, and write the table of docs/benchmarks.md
bench: $(READY)
	$(BIN)/python -m bench --write

## make kafka    Apache Kafka and its Python client into .venv, so that the section failover of make bench stands beside it; needs Maven and Java 17
kafka: $(READY)
	@command -v mvn >/dev/null || { \
		echo "mvn is needed to fetch Kafka's jars (Debian: apt-get install maven); or unpack Kafka's distribution and set KAFKA_HOME"; exit 1; }
	mvn --quiet --batch-mode --file bench/kafka-pom.xml dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/.venv/kafka/libs
	$(PIP) $(LOCKED) requirements/kafka.lock

## make nats     nats-server into .venv/bin, for the same; needs Go
nats: $(READY)
	@command -v go >/dev/null || { \
		echo "go is needed to build nats-server; or put a nats-server of 2.11 or newer on the PATH"; exit 1; }
	GOBIN=$(CURDIR)/$(BIN) go install github.com/nats-io/nats-server/v2@v2.15.2

## make demo     two clusters, a topic moved and a broker killed under load, Spark, a copy, DuckDB: measured. ARGS=--keep leaves them running
demo: $(READY)
	$(BIN)/python -m examples.demo $(ARGS)

## make house    how large the code is, how many names it has, how long its ways are: ARGS=--calls --list --words
house: $(READY)
	$(BIN)/python -m tools.house $(ARGS)

## make docs     write the pages of docs/reference from the code
docs: $(READY)
	$(BIN)/python -m tools.reference

## make screenshots  pictures of the console into docs/images; needs Chromium and its driver
screenshots: $(READY)
	$(BIN)/python -m tools.screenshots

## make proto    regenerate the code of src/sava/proto
proto: $(READY)
	$(BIN)/python -m tools.protos

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist src/*.egg-info
