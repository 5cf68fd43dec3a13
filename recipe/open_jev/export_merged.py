"""Merge a pinned Open-Jev checkpoint into its base model: ``jev export`` under the name that the recipe has always had.

python recipe/open_jev/export_merged.py --base weights/Qwen3.8-27B \\
    --checkpoint weights/Open-Jev-27B-v1.1/package/checkpoint --out weights/open-jev-27b-merged
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout works without being installed

from jev.export.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
