# make install-systemd [PREFIX=/opt/fedring] [DESTDIR=] [GPU=1] [SHARED=1] [TORCH_INDEX=...] [EXTRAS=...] installs the programs, their units and
# example configurations.
PREFIX ?= /opt/fedring
DESTDIR ?=
comma := ,
UNITS := $(DESTDIR)/etc/systemd/system
GPU ?=
SHARED ?=
# What is installed beside fl-client: EXTRAS=tracing is enough on a machine that has only clients, without flctl's tables. SHARED=1 is for servers that share a state.
EXTRAS ?= server,$(if $(SHARED),ha$(comma))cli,tracing

.PHONY: install-systemd install-programs install-units

install-systemd: install-programs install-units
	$(if $(DESTDIR),,systemd-sysusers fedring.conf)
	$(if $(DESTDIR),,systemd-tmpfiles --create fedring.conf)
	$(if $(DESTDIR),,systemctl daemon-reload)

install-programs:
	$(PYTHON) -m venv $(DESTDIR)$(PREFIX)
	$(DESTDIR)$(PREFIX)/bin/python -m pip install --quiet --upgrade pip
	$(DESTDIR)$(PREFIX)/bin/python -m pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(DESTDIR)$(PREFIX)/bin/python -m pip install --quiet --constraint constraints.txt '.[$(EXTRAS)]'
	sed -i '1s|#!.*|#!$(PREFIX)/bin/python|' $(addprefix $(DESTDIR)$(PREFIX)/bin/,fl-server fl-client flctl)

# Existing files in /etc/fedring stay as they are.
install-units:
	install -d '$(UNITS)' '$(DESTDIR)/etc/fedring'
	for unit in fl-server.service fl-client@.service; do \
	    sed 's|/opt/fedring/|$(PREFIX)/|' "deploy/systemd/$$unit" > "$(UNITS)/$$unit" && chmod 644 "$(UNITS)/$$unit" || exit; \
	done
	$(if $(GPU),install -Dm644 -t '$(UNITS)/fl-client@.service.d' 'deploy/systemd/fl-client@.service.d/gpu.conf')
	$(if $(SHARED),install -Dm644 -t '$(UNITS)/fl-server.service.d' 'deploy/systemd/fl-server.service.d/shared.conf')
	$(if $(SHARED),[ -e '$(DESTDIR)/etc/fedring/stores.env' ] || install -m600 -t '$(DESTDIR)/etc/fedring' deploy/systemd/stores.env)
	install -Dm644 deploy/systemd/fedring.sysusers '$(DESTDIR)/usr/lib/sysusers.d/fedring.conf'
	install -Dm644 deploy/systemd/fedring.tmpfiles '$(DESTDIR)/usr/lib/tmpfiles.d/fedring.conf'
	for file in server.toml client.toml; do \
	    [ -e "$(DESTDIR)/etc/fedring/$$file" ] || install -m644 -t '$(DESTDIR)/etc/fedring' "deploy/systemd/$$file" || exit; \
	done
