"""The port of a server. It is checked before a model is loaded, so this module imports nothing heavy."""

from __future__ import annotations

import errno
import socket
from typing import Any

from rope_patch.errors import EvaluationError, require


def check_packages() -> None:
    """Check that the packages of the server are installed.

    Raises:
        MissingPackage: a package is missing; the message names what to install.
    """
    for package in ("fastapi", "uvicorn", "openai"):
        require(package, "the server", extra="serve")


def check_port(host: str, port: int) -> None:
    """Check that a server can listen, before a model is loaded.

    Raises:
        EvaluationError: the number is no port, the port is taken or reserved, or the host is no address of this
            machine.
    """
    if not 0 <= port < 2**16:
        raise EvaluationError(f"--port {port}: 0 to 65535 are allowed")
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
                tried.bind(address)
    except socket.gaierror as error:
        raise EvaluationError(f"--host {host}: {error.strerror}; localhost is this machine alone") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = f"end the program that listens there, or pass another, such as --port {port % 65535 + 1}"
            raise EvaluationError(f"--port {port} is taken: {advice}") from error
        if error.errno == errno.EACCES:
            raise EvaluationError(f"--port {port} is reserved; pass one from 1024") from error
        # an address of a family that this machine does not have is left to the server, which uses the others


def listen(application: Any, host: str, port: int) -> None:
    """Serve until SIGTERM or Ctrl-C; running requests then have ten seconds."""
    import uvicorn

    uvicorn.run(
        application,
        host=host,
        port=port,
        http="h11",  # refuses endless headers
        log_level="info",
        access_log=False,
        timeout_graceful_shutdown=10,
    )
