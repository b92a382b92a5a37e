"""When to update, which way to send, where to place, when to scale. Pure arithmetic."""

from .curves import LossCurve, fit_loss_curve
from .forms import LossForm
from .losses import UpdateCosts, cumulative_inference_loss
from .optimal import optimal_schedule, schedule_front
from .placement import home_of
from .scaling import ScalePolicy
from .schedules import (
    Schedule,
    closed_form_schedule,
    epoch_schedule,
    fixed_schedule,
    greedy_schedule,
    greedy_threshold,
)
from .stream import PlanRequest, Stream
from .transfer import TransferSelector

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
    "home_of",
    "optimal_schedule",
    "schedule_front",
]
