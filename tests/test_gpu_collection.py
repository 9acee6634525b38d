"""Collection of the tests marked gpu on a machine that has few packages."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_tests_for_a_gpu_are_found_where_what_others_need_is_missing() -> None:
    code = (
        "import sys, pytest\n"
        "sys.modules |= dict.fromkeys(['datasets', 'lm_eval', 'trl', 'peft', 'matplotlib'])\n"
        "sys.exit(pytest.main(['-m', 'gpu', '--collect-only', '-q', '-p', 'no:cacheprovider']))"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-3000:]
    gpu_files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and "pytest.mark.gpu" in path.read_text(encoding="utf-8")
    }
    assert {line.partition("::")[0] for line in process.stdout.splitlines() if "::" in line} == gpu_files
