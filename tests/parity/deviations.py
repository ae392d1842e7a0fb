"""Where crossdevice does something else than TensorFlow on purpose, and why: all there is of it."""

from __future__ import annotations

_BROADCAST = (
    "What broadcasts to a variable's shape may be added to it; a shape that would change is a ValueError."
)
_NO_TENSORFLOW_ERRORS = "TensorFlow's own error classes are not ours: a mismatch is a ValueError."
_PAGE = "The reference page says ValueError."
_NOT_COLLAPSED = (
    "Arrays and numbers are one for each replica, whoever made them: TensorFlow collapses those that "
    "are one object, so that sums depend on it."
)
_SCALARS = "Scalars have no axis to be cut along, which is a ValueError with a message, not an IndexError."
_REFUSALS = "What is refused is a ValueError with a message, not a bare assertion."

DEVIATIONS = {
    "variables: dtype of a write/*/complex": "A dtype that does not fit is a mismatch, a ValueError.",
    "variables: dtype of a write/int32/floats": "A dtype that does not fit is a mismatch, a ValueError.",
    "variables: wrong shape/assign_add/*": _BROADCAST,
    "variables: wrong shape/assign_sub/*": _BROADCAST,
    "variables: scatter/an array/*": "What is given as the wrong kind of value is a ValueError.",
    "variables: update of a copy each/AUTO": "A PerReplica would make copies differ that are to be the same.",
    "reductions: own class": "What an overridden hook returns is checked: a component for each destination.",
    "reductions: count/HierarchicalCopyAllReduce/3/*": "Every replica counts; there the last does not.",
    "reductions: wrong operation/sum": "Operations may be given by name everywhere.",
    "reductions: wrong operation/MEAN": "Operations may be given by name everywhere.",
    "reductions: wrong pairs/none": _PAGE,
    "reductions: wrong pairs/number": _PAGE,
    "reductions: wrong pairs/empty": "An empty batch has an empty result.",
    "reductions: wrong value/'text'": _PAGE,
    "reductions: mixed dtypes in a batch/HierarchicalCopyAllReduce": "A batch may mix dtypes.",
    "reductions: different shapes": _NO_TENSORFLOW_ERRORS,
    "reductions: different dtypes": _NO_TENSORFLOW_ERRORS,
    "strategies: one result/3": _NOT_COLLAPSED,
    "strategies: one result/2.5": _NOT_COLLAPSED,
    "strategies: one result/True": _NOT_COLLAPSED,
    "strategies: one tensor": _NOT_COLLAPSED,
    "strategies: all_reduce/constant": _NOT_COLLAPSED,
    "strategies: number in a merge_call": _NOT_COLLAPSED,
    "strategies: gather/wrong axis": _NO_TENSORFLOW_ERRORS,
    "strategies: reduce_to/SUM/mirrored": _REFUSALS,
    "strategies: reduce_to/a list": _REFUSALS,
    "strategies: broadcast_to/None": _REFUSALS,
    "strategies: update of a plain variable": _REFUSALS,
    "strategies: dataset/uneven": "Parts differ by one example at most; TensorFlow's last part may be empty.",
    "strategies: scalars/from a function/4 for 3": "Nothing is dropped: TensorFlow leaves the fourth out.",
    "strategies: scalars/dataset/4 for *": _SCALARS,
    "strategies: scalars/dataset/6 for 3": _SCALARS,
    "strategies: reduce alike/*/SUM": _REFUSALS,
    "strategies: batch reduced alike/*": "As in reduce_to: it is its own mean, and the sum is refused.",
    "strategies: duplicates": "Several replicas may sit on one device.",
}
"""Patterns of names of programs, and the reason."""
