# make log       set up, then run chapter 10's optimisation log
# make test      set up, then lint and test
# make lab       set up, then read the chapters' notebooks in JupyterLab
# make notebooks set up, then execute all notebooks and keep their outputs
# make index     renew the tables of the READMEs
#
# PYTHON=python3.12   which Python makes the environment (3.11 to 3.14)
# VENV=               empty: use PYTHON's own environment, install nothing
# ARGS="--smoke"      handed to the log, to pytest, the notebooks or JupyterLab

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PIP_FLAGS ?= --quiet --disable-pip-version-check

ifeq ($(strip $(VENV)),)
RUN = $(PYTHON)
else
RUN = $(VENV)/bin/python
endif

# $(call install,FILES): install the first of FILES, again only when the
# content of one of them has changed since
define install
@[ -n "$(VENV)" ] || exit 0; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "Python 3.11 to 3.14 is needed: make $@ PYTHON=python3.12"; exit 1; }; \
"$(RUN)" -m pip --version > /dev/null 2>&1 || { \
	echo "Making $(VENV)"; $(PYTHON) -m venv "$(VENV)" || exit 1; }; \
changed=; for file in $(1); do \
	cksum < $$file | cmp -s - "$(VENV)/$$file.installed" || changed=$$file; \
done; \
[ -n "$$changed" ] || exit 0; \
echo "Installing $(firstword $(1)) into $(VENV): minutes, once"; \
"$(RUN)" -m pip install $(PIP_FLAGS) -r $(firstword $(1)) || exit 1; \
for file in $(1); do cksum < $$file > "$(VENV)/$$file.installed"; done
endef

.PHONY: log test lab notebooks index

log:
	$(call install,requirements.txt)
	@"$(RUN)" -m ch10_gpt2.ladder $(ARGS)

test:
	$(call install,requirements-dev.txt requirements.txt)
	@"$(RUN)" -m ruff check .
	@"$(RUN)" -m ruff format --check .
	@"$(RUN)" -m pytest --timeout 600 $(ARGS)

lab:
	$(call install,requirements.txt)
	@PYTHONPATH="$(CURDIR)" "$(RUN)" -m jupyterlab --ServerApp.ip=127.0.0.1 \
		--LabApp.app_settings_dir="$(CURDIR)/chapters/lab" \
		--LabApp.default_url=/lab/tree/README.md $(ARGS)

notebooks:
	$(call install,requirements.txt)
	@"$(RUN)" -m chapters notebooks $(ARGS)

index:
	$(call install,requirements.txt)
	@"$(RUN)" -m chapters index
