"""``lifeboat-cache doctor``: checks of this installation and machine.

Other distributions add checks through the entry-point group
``lifeboat_cache.doctor``; each entry loads to a function
``checks(context: DoctorContext) -> Iterable[Check]``. Checks look only: what changes
something is a :class:`Fix`, applied when the user agrees.
"""

from lifeboat_cache.doctor.check import Check, DoctorContext, Fix, Status
from lifeboat_cache.doctor.run import GROUP, run_checks

__all__ = ["GROUP", "Check", "DoctorContext", "Fix", "Status", "run_checks"]
