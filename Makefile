# Two commands for people: `make chat` and `make test`. Everything lands in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# TORCH chooses the build, for example: make chat TORCH="torch==2.13.0+cpu"
TORCH ?= torch>=2.11,<2.14
STAMPS := $(VENV)/.stamps
# What chatrt is measured against lives apart from it.
PEERS := .venv-peers
# SDKs that the tests run unmodified live apart too: they forbid packages that chatrt needs.
CLIENTS := .venv-clients
NODE_CLIENTS := tests/clients/node

.PHONY: chat test clients test-clients check check-native check-speculation check-living format bench bench-peers clean

chat: $(STAMPS)/serve
	@$(BIN)/chatrt kernels --quiet-if-present
	@$(BIN)/chatrt pull --quiet-if-present
	@$(BIN)/chatrt chat

test: $(STAMPS)/test
	@$(BIN)/chatrt pull --quiet-if-present
	$(BIN)/python -m pytest -q

# The SDKs of tests/clients: Python's and, where npm is there, Node's.
clients: $(CLIENTS)/.installed $(if $(shell command -v npm 2>/dev/null),$(NODE_CLIENTS)/node_modules/.package-lock.json)

test-clients: $(STAMPS)/test clients
	@$(BIN)/chatrt pull --quiet-if-present
	$(BIN)/python -m pytest -q tests/clients

check: $(STAMPS)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The kernels' tests on kernels that check their own memory accesses and arithmetic (Linux, GCC).
# The runtimes come before everything else, that of C++ among them: the first one looks for it.
SOURCE := kernels/chatrt_kernels/cpu/source
SANITIZE := -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
RUNTIMES = $(foreach name,libasan.so libubsan.so libstdc++.so.6,$(shell $(CXX) -print-file-name=$(name)))
NATIVE_TESTS = $(filter-out %_build.py %_simd.py %_neon.py,$(wildcard tests/chatrt_kernels/test_cpu_*.py))

check-native: $(STAMPS)/test
	$(CXX) -std=c++17 -march=native -fsyntax-only -Wall -Wextra -Werror $(SOURCE)/*.cpp
	LD_PRELOAD='$(RUNTIMES)' ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 \
	UBSAN_OPTIONS=print_stacktrace=1 CHATRT_TEST_KERNEL_FLAGS='$(SANITIZE)' CHATRT_TEST_TIME_SCALE=10 \
	CXX='$(CXX)' $(BIN)/python -m pytest -q $(NATIVE_TESTS)

# That speculation changes no text: all bundled prompts with every drafter, 200 tokens each, and more
# interleavings than the tests try. About half an hour on two cores.
check-speculation: $(STAMPS)/test
	@$(BIN)/chatrt pull --quiet-if-present
	CHATRT_ALL_PROMPTS=1 $(BIN)/python -m pytest -q $(wildcard tests/chatrt/test_speculation_*.py)

# Six thousand random operations against the running server, and real kills: about two minutes.
check-living: $(STAMPS)/test
	CHATRT_LONG=1 $(BIN)/python -m pytest -q $(wildcard tests/chatrt/test_living_*.py)

format: $(STAMPS)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# README's figures and plots, measured anew: most of an hour, on a machine that does nothing else.
# llama.cpp is among them behind `make bench-peers`.
bench: $(STAMPS)/bench
	@$(BIN)/chatrt kernels --quiet-if-present
	@$(BIN)/chatrt pull --quiet-if-present
	$(BIN)/chatrt bench all build/bench --readme README.md --plots docs/plots

# The same conversations in llama.cpp and transformers, from an environment of their own.
bench-peers: $(STAMPS)/serve $(PEERS)/.installed
	@$(BIN)/chatrt kernels --quiet-if-present
	@$(BIN)/chatrt pull --quiet-if-present
	$(BIN)/chatrt bench peers

clean:
	rm -rf $(VENV) $(PEERS) $(CLIENTS) $(NODE_CLIENTS)/node_modules

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("chatrt needs Python 3.11 or newer, this is %d.%d" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)

$(STAMPS)/serve: pyproject.toml | $(VENV)/bin/python
	@echo 'installing what serving needs into $(VENV) (a minute or more; torch is large)'
	@$(BIN)/python -m pip install '$(TORCH)' -e '.[serve]'
	@touch $@

$(PEERS)/.installed: | $(VENV)/bin/python
	@echo 'installing llama-cpp-python and transformers into $(PEERS) (llama.cpp is compiled: some minutes, and a C++ compiler)'
	@$(BIN)/python -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install '$(TORCH)' 'transformers>=5.0,<6' 'accelerate>=1.0' 'gguf>=0.17' 'llama-cpp-python>=0.3.16,<0.4'
	@touch $@

$(CLIENTS)/.installed: tests/clients/requirements.txt | $(VENV)/bin/python
	@echo 'installing the SDKs that the tests run into $(CLIENTS) (half a minute)'
	@$(BIN)/python -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install -r $<
	@touch $@

$(NODE_CLIENTS)/node_modules/.package-lock.json: $(NODE_CLIENTS)/package-lock.json
	npm ci --prefix $(NODE_CLIENTS) --no-audit --no-fund --ignore-scripts
	@touch $@

$(STAMPS)/bench: pyproject.toml | $(VENV)/bin/python
	@echo 'installing what measuring needs into $(VENV) (a minute or more; torch is large)'
	@$(BIN)/python -m pip install '$(TORCH)' -e '.[serve,bench]'
	@touch $@ $(STAMPS)/serve

$(STAMPS)/test: pyproject.toml | $(VENV)/bin/python
	@echo 'installing what the tests need into $(VENV) (a minute or more; torch is large)'
	@$(BIN)/python -m pip install '$(TORCH)' -e '.[serve,test]'
	@touch $@ $(STAMPS)/serve

$(STAMPS)/dev: pyproject.toml | $(VENV)/bin/python
	@echo 'installing what the checks need into $(VENV) (a minute or more; torch is large)'
	@$(BIN)/python -m pip install '$(TORCH)' -e '.[serve,test,dev]'
	@touch $@ $(STAMPS)/serve $(STAMPS)/test
