"""What a process that a test starts is given."""

import os
import re
import socket


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def flags_but_devices():
    """XLA's flags here, which shorten compilation, without the eight simulated devices."""
    return re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
