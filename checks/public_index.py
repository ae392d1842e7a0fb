"""uv as it works on a machine that nobody has configured: with the public index alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from uv import find_uv_bin

ROOT = Path(__file__).resolve().parents[1]

LOCK = ROOT / "constraints.txt"

INHERITED = (
    *("PATH", "SYSTEMROOT", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
)
"""The variables that decide how the index is reached, but not what is found there."""


class IndexUnreachableError(Exception):
    """Nothing was found out, because the index did not answer."""


_UV = find_uv_bin()
"""Found once, before there are threads: `sysconfig`, which is asked for it, is not safe in them."""


def clean_environment(home: str, **more: str) -> dict[str, str]:
    """An environment without any setting of pip, uv, Python or this library."""
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return {**inherited, "HOME": home, "USERPROFILE": home, **more}


def run_uv(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs uv in an empty home directory; only what it downloads is kept, beside this Python."""
    with tempfile.TemporaryDirectory() as home:
        ended = subprocess.run(
            # The certificates that the system trusts, as pip uses: a company's own among them.
            [
                _UV,
                *arguments,
                "--no-config",
                "--system-certs",
                "--cache-dir",
                str(Path(sys.prefix) / "uv-cache"),
            ],
            cwd=cwd,
            env=clean_environment(home, **variables),
            capture_output=True,
            text=True,
            check=False,
        )
    if ended.returncode and "Failed to fetch" in ended.stderr:
        raise IndexUnreachableError(ended.stderr.strip())
    return ended
