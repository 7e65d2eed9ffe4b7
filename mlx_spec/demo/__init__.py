"""The default pair: a small target and an EAGLE-3 drafter trained for it."""

from mlx_spec.demo.target import demo_drafter_path, demo_target_path

__all__ = ["demo_drafter_path", "demo_target_path"]
