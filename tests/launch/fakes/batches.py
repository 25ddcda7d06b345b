"""A fake batches process: writes its ready-file and ends with 0 at a SIGTERM."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from baton.runtime.ports import write_ready_file
from baton.runtime.process import die_with_parent


def main() -> None:
    die_with_parent()
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    data_dir = Path(sys.argv[sys.argv.index("--data-dir") + 1])
    write_ready_file(sys.argv[sys.argv.index("--ready-file") + 1], {"http": str(data_dir)})
    while not ended:
        signal.pause()
    print("ended by SIGTERM", flush=True)


if __name__ == "__main__":
    main()
