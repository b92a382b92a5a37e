"""Calculations for loss curves, update schedules, the choice of a transport, home shards, and the number of shards."""

from typing import TYPE_CHECKING

from ..store.removed import removed
from .curves.curve import LossCurve, fit_loss_curve
from .curves.forms import LossForm
from .curves.losses import UpdateCosts, cumulative_inference_loss
from .scaling import ScalePolicy
from .schedules.optimal import optimal_schedule
from .schedules.request import PlanRequest
from .schedules.schedule import (
    Schedule,
    closed_form_schedule,
    epoch_schedule,
    fixed_schedule,
    greedy_schedule,
    greedy_threshold,
)
from .schedules.stream import Stream
from .schedules.transfer import TransferSelector

__all__ = [
    "LossCurve",
    "LossForm",
    "PlanRequest",
    "ScalePolicy",
    "Schedule",
    "Stream",
    "TransferSelector",
    "UpdateCosts",
    "closed_form_schedule",
    "cumulative_inference_loss",
    "epoch_schedule",
    "fit_loss_curve",
    "fixed_schedule",
    "greedy_schedule",
    "greedy_threshold",
    "optimal_schedule",
]

if not TYPE_CHECKING:
    __getattr__ = removed(__name__, {"schedule_front": "optimal_schedule(..., most=N) with the numbers N to compare"})
