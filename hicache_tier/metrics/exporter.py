"""Where the metrics are to be had: in the process's registry, or at a port of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_tier.errors import InvalidArgumentError

from .instruments import Instruments

if TYPE_CHECKING:
    from threading import Thread


class Exporter:
    """Instruments, and the server that shows them where a port was asked for.

    Parameters
    ----------
    port : int, optional
        Without one the instruments are in the process's registry, and whoever serves that shows them.
    address : str
        Where the port is opened; other hosts see nothing unless it is one that they reach.

    Attributes
    ----------
    instruments : Instruments
    port : int or None

    Raises
    ------
    InvalidArgumentError
        Where the port cannot be had.
    """

    def __init__(self, port: int | None = None, address: str = "127.0.0.1") -> None:
        self.port = port
        self._server: Any = None
        self._thread: Thread | None = None
        if port is None:
            self.instruments = Instruments.of()
            return
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        self.instruments = Instruments.of(registry)
        try:
            self._server, self._thread = start_http_server(port, address, registry=registry)
        except (OSError, OverflowError, ValueError) as error:  # taken; above 65535; an address that is none
            said = str(getattr(error, "strerror", None) or error).rstrip(".")
            raise InvalidArgumentError(
                f"metrics_port {port} cannot be had at {address!r}: {said}."
            ) from error

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._thread is not None:
            self._thread.join(2.0)
            self._thread = None
