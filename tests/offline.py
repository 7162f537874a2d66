"""Block the network of a process, loopback and Unix sockets excepted."""

import ipaddress
import socket


class Blocked(OSError):
    """A test tried to leave this machine."""


class BlockedName(socket.gaierror):
    """A test tried to look up a name."""


def is_local(host) -> bool:
    """Say whether an address or a name means this machine."""
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host in (None, "", "localhost", "ip6-localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


def is_number(host) -> bool:
    """Say whether an address needs no looking up."""
    try:
        ipaddress.ip_address(host.split("%")[0])
    except (AttributeError, ValueError):
        return False
    return True


def block() -> None:
    """Replace the ways out: connect, connect_ex, sendto and name look-ups."""

    def guarded(original, place):
        def call(self, *args):
            inside = self.family in (socket.AF_INET, socket.AF_INET6)
            if inside and not is_local(args[place][0]):
                raise Blocked(
                    f"the network is blocked in tests: {args[place]}"
                )
            return original(self, *args)

        return call

    for name, place in (("connect", 0), ("connect_ex", 0), ("sendto", -1)):
        original = getattr(socket.socket, name)
        setattr(socket.socket, name, guarded(original, place))

    def looked_up(original):
        def call(host, *args, **kwargs):
            if host == socket.gethostname():
                host = "127.0.0.1"  # no question to a name server
            if not (is_local(host) or is_number(host)):
                raise BlockedName(
                    socket.EAI_NONAME, f"look-ups are blocked in tests: {host}"
                )
            return original(host, *args, **kwargs)

        return call

    for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex"):
        setattr(socket, name, looked_up(getattr(socket, name)))
