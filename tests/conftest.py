import pytest
import torch


def pytest_collection_modifyitems(items):
    """Marks by folder, so that no test can forget; GPU tests need a GPU."""
    for item in items:
        folder = item.path.relative_to(item.config.rootpath / "tests").parts[0]
        if folder in ("e2e", "gpu"):
            item.add_marker(getattr(pytest.mark, folder))
        if folder == "gpu" and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
