"""Back ends: where jobs run. One package per scheduler behind the interface of base.py."""
