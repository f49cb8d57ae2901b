# Two commands for people: `make chat` and `make test`. Everything lands in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# TORCH chooses the build, for example: make chat TORCH="torch==2.13.0+cpu"
TORCH ?= torch>=2.11,<2.14
STAMPS := $(VENV)/.stamps

.PHONY: chat test check format bench clean

chat: $(STAMPS)/serve
	@$(BIN)/chatrt pull --quiet-if-present
	@$(BIN)/chatrt chat

test: $(STAMPS)/test
	@$(BIN)/chatrt pull --quiet-if-present
	$(BIN)/python -m pytest -q

check: $(STAMPS)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMPS)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMPS)/serve
	@$(BIN)/chatrt pull --quiet-if-present
	$(BIN)/chatrt bench sessions

clean:
	rm -rf $(VENV)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("chatrt needs Python 3.11 or newer, this is %d.%d" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)

$(STAMPS)/serve: pyproject.toml | $(VENV)/bin/python
	@echo 'installing what serving needs into $(VENV) (a minute or more; torch is large)'
	@$(BIN)/python -m pip install '$(TORCH)' -e '.[serve]'
	@touch $@

$(STAMPS)/test: pyproject.toml | $(VENV)/bin/python
	@echo 'installing what the tests need into $(VENV) (a minute or more; torch is large)'
	@$(BIN)/python -m pip install '$(TORCH)' -e '.[serve,test]'
	@touch $@ $(STAMPS)/serve

$(STAMPS)/dev: pyproject.toml | $(VENV)/bin/python
	@echo 'installing what the checks need into $(VENV) (a minute or more; torch is large)'
	@$(BIN)/python -m pip install '$(TORCH)' -e '.[serve,test,dev]'
	@touch $@ $(STAMPS)/serve $(STAMPS)/test
