"""TLS: the certificate of a server, checked at the start and read again when it changes, and those that it trusts."""

from __future__ import annotations

import datetime
import logging
import ssl
from pathlib import Path
from typing import Literal

from cryptography import x509

from fd_core.config import ListenConfig
from fd_core.errors import ConfigError

log = logging.getLogger(__name__)


class ServingTls:
    """The certificate of a server. New connections use the current files; open ones continue unchanged."""

    def __init__(self, config: ListenConfig) -> None:
        """Raises `ConfigError` that names the flag if a file is missing, damaged, or does not fit the others."""
        self._config = config
        self._stamps = self._read_stamps()
        self.context = _server_context(config)

    @classmethod
    def of(cls, config: ListenConfig) -> ServingTls | None:
        """Return the certificate that the settings name; None if they name none. Raises `ConfigError`."""
        if config.ssl_certfile is not None:
            return cls(config)
        for flag, given in (
            ("--ssl-keyfile", config.ssl_keyfile),
            ("--ssl-keyfile-password", config.ssl_keyfile_password),
            ("--ssl-ca-certs", config.ssl_ca_certs),
        ):
            if given:
                raise ConfigError(f"{flag} requires a certificate", field=flag, hint="add --ssl-certfile")
        return None

    def refresh(self) -> None:
        """Reload the files if they have changed; invalid files are logged and change nothing."""
        stamps = self._read_stamps()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self.context = _server_context(self._config)
        except ConfigError as error:
            log.warning("the changed TLS files are invalid, the previous ones stay in use: %s", error)
        else:
            log.info("new connections use the changed TLS certificate")

    def _read_stamps(self) -> list[tuple[int, int, int] | None]:
        config = self._config
        files = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
        return [_stamp(Path(name)) for name in files if name is not None]


def client_context(ca_certs: str | None, field: str, own: ListenConfig) -> ssl.SSLContext | Literal[True]:
    """Return a client's TLS context, which trusts a file's authorities or the system's. `ConfigError` names `field`."""
    if ca_certs is None and own.ssl_certfile is None:
        return True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca_certs is None:
        context.load_default_certs()
    else:
        _load_authorities(context, ca_certs, field)
    if own.ssl_certfile is not None:
        _load_certificate(context, own)
    return context


def _server_context(config: ListenConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, config)
    if config.ssl_ca_certs is not None:
        _load_authorities(context, config.ssl_ca_certs, "--ssl-ca-certs")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_certificate(context: ssl.SSLContext, config: ListenConfig) -> None:
    certificate = str(config.ssl_certfile)
    try:
        until = x509.load_pem_x509_certificate(_read(certificate, "--ssl-certfile")).not_valid_after_utc
    except ValueError as error:
        raise ConfigError(f"{certificate} contains no certificate in PEM format", field="--ssl-certfile") from error
    key = config.ssl_keyfile
    if key is not None:
        _read(key, "--ssl-keyfile")
    try:
        # Without a password OpenSSL would prompt for one on the terminal.
        context.load_cert_chain(certificate, key, password=config.ssl_keyfile_password or "")
    except (ssl.SSLError, OSError, ValueError) as error:
        field = "--ssl-certfile" if key is None else "--ssl-keyfile"
        message = f"{key or certificate} contains no private key that matches the certificate in {certificate}"
        hint = "an encrypted key requires --ssl-keyfile-password" if not config.ssl_keyfile_password else None
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            message, hint = f"the private key in {key or certificate} does not match the certificate", None
        raise ConfigError(message, field=field, hint=hint) from error
    left = until - datetime.datetime.now(datetime.UTC)
    if left < datetime.timedelta():
        log.warning("the TLS certificate in %s expired on %s: clients will reject it", certificate, until.date())
    elif left < datetime.timedelta(days=7):
        log.warning("the TLS certificate in %s expires on %s", certificate, until.date())


def _load_authorities(context: ssl.SSLContext, path: str, field: str) -> None:
    _read(path, field)
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{path} contains no certificates in PEM format", field=field) from error


def _read(path: str, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or str(error)).lower()}", field=field) from error


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
