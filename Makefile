# Two commands matter: make wheel, make test. `make help` lists all of them.
# Options: TORCH=2.14 CUDA=cu130 PYTHON=3.11 ARCHS="9.0"; each has a default from release/matrix.toml or the machine.
SHELL := /bin/sh
python := python3
# An option as one argument, whatever it holds; nothing where it is empty.
give = $(if $($(2)),--$(1)='$(subst ','\'',$($(2)))')
choice = $(call give,torch,TORCH) $(call give,cuda,CUDA)
cell = $(choice) $(call give,python,PYTHON) $(call give,archs,ARCHS)
engine = $(call give,platform,PLATFORM) $(call give,engine,ENGINE)

.PHONY: help wheel plain-wheel image runtime-image try-image container test bench bench-guard profile clients page-tests \
	sanitize sanitize-gpu stage try clusters release-rehearsal docs lint lint-workflows format typecheck clean

help:
	@echo "make wheel        build, verify, install and exercise a wheel; TEST=no only builds and verifies it"
	@echo "make test         build, install and run the test suite; PYTEST=\"-k name\" passes options"
	@echo "make clients      try channels with old and new pip, uv and poetry"
	@echo "make page-tests   try the index's landing page in Chromium; SCREENSHOTS=folder takes pictures of it"
	@echo "make bench        build, install and measure; BENCH=\"--suite small\" passes options, BENCH=--help lists them"
	@echo "make bench-guard  build, install and compare the CPU's times with the committed report"
	@echo "make profile      trace one case on a GPU and measure its kernels; CASE=\"float16 Sk=2048 causal forward\""
	@echo "make sanitize     CPU tests with AddressSanitizer and UBSan"
	@echo "make sanitize-gpu  compute-sanitizer's four tools over the kernels, on every GPU; TOOLS=\"memcheck racecheck\" chooses"
	@echo "make plain-wheel  build the wheel without native code into dist/"
	@echo "make image        build the image that wheels for others are built in; needs docker, or ENGINE=podman"
	@echo "make runtime-image  build the image that programs start from, with a cell's torch and its staged wheel"
	@echo "make try-image    run that image: doctor, health check, and a program in an image of two lines"
	@echo "make container    build and test a cell's wheels in that image, for every Python, into dist/"
	@echo "make stage        lay out a release from the wheels in WHEELS, if they are all there; TAG=v1.0.0 must fit"
	@echo "make try          install a staged wheel beside its torch and exercise it"
	@echo "make clusters     try the examples for clusters with a wheel of dist/, in a Slurm of one node; needs root"
	@echo "make release-rehearsal  a release of a small matrix, from tags to installs"
	@echo "make docs         build the documentation's pages; a warning is an error"
	@echo "make lint-workflows  lint workflows, Dockerfiles and shell scripts"
	@echo "make lint         ruff's checks and formatting, without changing anything"
	@echo "make format       let ruff reformat"
	@echo "make typecheck    mypy --strict"
	@echo "make clean        remove build/, dist/, profile/ and caches of this folder"
	@echo
	@echo "Options of wheel, test, bench and profile: TORCH=2.14 CUDA=cu130 (or cpu) PYTHON=3.11 ARCHS=\"9.0\""
	@echo "What is fetched is kept in \$${XDG_CACHE_HOME:-~/.cache}/scaled-mask-softmax"

wheel:
	@$(python) -m release wheel $(cell) $(call give,test,TEST)

test:
	@$(python) -m release test $(cell) $(call give,pytest,PYTEST)

bench:
	@$(python) -m release bench $(cell) $(call give,bench,BENCH)

# The fused case beside torch.softmax, as in the committed report; the margin is for another model of CPU. That report is
# of AVX2, which both are kept to.
guard := --device cpu --threads 1 --suite sweep --case causal+mask --direction forward --dtype float32 bfloat16 \
	--columns 512 --peers softmax --each 0.2 --compare benchmarks/reports/cpu.json --slower 1.25
bench-guard:
	@ATEN_CPU_CAPABILITY=avx2 $(python) -m release bench $(cell) --bench='$(guard)'

profile:
	@$(python) -m release profile $(cell) $(call give,case,CASE)

plain-wheel:
	@$(python) -m release plain-wheel dist

image:
	@$(python) -m release image $(choice) $(engine) $(call give,base,BASE) --run

runtime-image:
	@$(python) -m release runtime-image $(choice) $(engine) $(call give,base,BASE) $(call give,site,SITE) \
		$(call give,name,IMAGE) $(call give,source,SOURCE) --run

try-image:
	@ENGINE=$(ENGINE) .ci/try-image "$$($(python) -m release runtime-image $(choice) $(engine) $(call give,name,IMAGE) --reference)"

container:
	@$(python) -m release container $(cell) $(engine)

lint-workflows:
	@$(python) -m release lint-workflows

docs:
	@$(python) -m release docs

lint:
	@$(python) -m release lint

clients:
	@$(python) -m release clients $(call give,pytest,PYTEST)

page-tests:
	@$(python) -m release page-tests $(call give,pytest,PYTEST) $(call give,screenshots,SCREENSHOTS)

stage:
	@$(python) -m release stage $(or $(WHEELS),dist) $(call give,tag,TAG)

clusters:
	@$(python) -m release clusters $(cell)

try:
	@$(python) -m release try $(or $(SITE),build/staged/site) $(cell)

release-rehearsal:
	@$(python) -m release rehearsal $(call give,archs,ARCHS)

sanitize:
	@$(python) -m release sanitize $(cell) $(call give,pytest,PYTEST)

sanitize-gpu:
	@$(python) -m release sanitize-gpu $(cell) $(call give,tools,TOOLS) $(call give,jobs,JOBS) \
		$(call give,compute-sanitizer,SANITIZER) $(call give,pytest,PYTEST)

format:
	@$(python) -m release format

typecheck:
	@$(python) -m release typecheck $(cell)

clean:
	@rm -rf build dist profile .pytest_cache .mypy_cache .ruff_cache .hypothesis
