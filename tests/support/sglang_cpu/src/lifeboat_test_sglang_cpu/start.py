"""What must hold before anything else is imported; named in a ``.pth`` file.

torchvision's wheel was built for another torch than the CPU build. Its operators
are not there, and the module that describes them fails at import; SGLang needs
torchvision at import only.
"""

import sys
import types

__all__: list[str] = []

sys.modules.setdefault(
    "torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations")
)
