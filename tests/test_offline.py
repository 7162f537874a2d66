"""The network is blocked in tests, here and in the processes they start."""

import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest


def test_the_network_is_blocked():
    with pytest.raises(OSError, match="blocked in tests"):
        socket.create_connection(("192.0.2.1", 80), timeout=5)
    with pytest.raises(socket.gaierror, match="blocked in tests"):
        socket.getaddrinfo("example.com", 80)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        with pytest.raises(OSError, match="blocked in tests"):
            udp.sendto(b"", ("192.0.2.1", 53))
        with pytest.raises(OSError, match="blocked in tests"):
            udp.connect_ex(("192.0.2.1", 53))
    with pytest.raises(urllib.error.URLError, match="blocked in tests"):
        urllib.request.urlopen("http://example.com", timeout=5)


def test_it_is_blocked_in_child_processes():
    code = "import socket; socket.create_connection(('192.0.2.1', 80), 5)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "blocked in tests" in done.stderr


def test_loopback_is_open():
    with socket.create_server(("127.0.0.1", 0)) as server:
        for host in ("127.0.0.1", "localhost"):
            socket.create_connection((host, server.getsockname()[1])).close()
    socket.getaddrinfo(socket.gethostname(), None)
