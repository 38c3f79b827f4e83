# make demo      the whole road on data it makes itself: train on 2 processes, evaluate, export, predict
# make test      what CI runs (minutes); make test-all also runs what takes long
# make faults    every fault of docs/faults.md, and writes that page (hours); make soak alone: 30 min
# make fuzz      files and requests that no honest program writes, 10 minutes (SEED=1)
# make check     ruff and mypy;  make bench  measured speed;  make docs  regenerate generated files
# make site      the documentation for a browser: output/site
VENV ?= .venv
PY := $(VENV)/bin/python
FLEETRUN := $(VENV)/bin/fleetrun
STAMP := $(VENV)/.ppdist-installed
DEMO := output/demo
DEMO_CONFIG := configs/examples/demo.yml

.PHONY: demo test test-all faults soak fuzz check bench docs site install clean

install: $(STAMP)

# A Paddle that is already in the environment (a paddlepaddle-gpu of yours) is left alone.
$(STAMP): setup.py
	test -x $(PY) || python3 -m venv $(VENV)
	if $(PY) -c "import paddle" 2>/dev/null; then extras=dev; else extras=cpu,dev; fi; \
	  $(PY) -m pip install --quiet --disable-pip-version-check -e ".[$$extras]"
	touch $@

demo: install
	$(PY) tools/data.py synthetic --out $(DEMO)_data --train 320 --val 80
	$(FLEETRUN) --nproc_per_node 2 tools/train.py -c $(DEMO_CONFIG) --eval
	$(FLEETRUN) --nproc_per_node 2 tools/eval.py -c $(DEMO_CONFIG) -w $(DEMO)/checkpoints/best \
	  --json $(DEMO)/eval.json --at-least mAP50=0.8
	$(PY) tools/export.py -c $(DEMO_CONFIG) -w $(DEMO)/checkpoints/best --out $(DEMO)/export
	$(PY) tools/infer.py --model $(DEMO)/export \
	  --source $(DEMO)_data/images/val --out $(DEMO)/predictions
	$(PY) tools/report.py $(DEMO)
	@echo
	@echo "Done. Look at:"
	@echo "  $(DEMO)/report.html    the run on one page, for a browser"
	@echo "  $(DEMO)/plots          its pictures: batches, curves, mistakes"
	@echo "  $(DEMO)/predictions    validation images with predicted boxes"
	@echo "  $(DEMO)/metrics.jsonl  losses, rates and mAP, one JSON object a line"
	@echo "  $(DEMO)/export         the Paddle Inference model and its infer.yml"
	@echo "  $(VENV)/bin/visualdl --logdir $(DEMO)/vdl --language en --disable-telemetry"

# One process a core and $(1) more, because many tests wait for processes that they have started; each
# takes whole files, in the order of tests/conftest.py.  Compiled files are kept, else every process would compile anew.
# A process that dies ends the run: with another in its place xdist would wait forever.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n $(shell expr $$(nproc) + $(1)) --dist loadfile \
  --no-loadscope-reorder --max-worker-restart 0

test: install
	$(call PYTEST,2) -m "not slow"

# torch writes the .pt files that a few slow tests read; nothing else needs it.  What deploy/cpp is
# built with is gathered where it can be; else a line says what is missing, and its tests are skipped.
test-all: install
	$(PY) -c "import torch" 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check \
	  torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu || $(PY) -m pip install --quiet torch==2.13.0
	-$(PY) -m tests.deploy.cpp_requirements
	$(call PYTEST,1)

# The page is written also when a test fails: it says so.  Where one did not run it stays as it is.
faults: install
	mkdir -p output/faults
	-$(PY) tools/faults.py kills --points 50 --json output/faults/kills.json
	-OMP_NUM_THREADS=1 $(PY) -m pytest $$($(PY) -m tests.faults.report --tests) \
	  -o junit_family=xunit1 --junitxml output/faults/ran.xml
	$(PY) -m tests.faults.report output/faults/ran.xml output/faults/kills.json output/faults/soak.json

soak: install
	mkdir -p output/faults
	$(PY) tools/faults.py soak --minutes 30 --json output/faults/soak.json

MINUTES := 10
SEED := 1
fuzz: install
	OMP_NUM_THREADS=1 $(PY) -m tests.faults.fuzz --minutes $(MINUTES) --seed $(SEED)

check: install
	$(PY) -m ruff check ppdist tools tests deploy benchmarks examples
	$(PY) -m ruff format --check ppdist tools tests deploy benchmarks examples
	$(PY) -m mypy

bench: install
	for layers in auto plain; do \
	  $(PY) tools/benchmark.py train -c configs/ppyoloe/ppyoloe_crn_s_300e_coco.yml --synthetic \
	    -o train.cpu_kernels=$$layers model.image_size=[320,320] train.batch_size_per_card=4 \
	    train.multi_scale=[] data.workers=0 || exit 1; done

docs: install
	$(PY) tools/docs.py

site: install
	$(PY) -m mkdocs --version >/dev/null 2>&1 || $(PY) -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "open output/site/index.html; its search needs a server: python3 -m http.server -d output/site"

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
