"""The chat models that the settings name."""

from __future__ import annotations

from optiml.llm.chat import ChatModel
from optiml.llm.model import Model
from optiml.llm.text_mixture import Expert, TextMixture
from optiml.settings import Settings


def chat_models(settings: Settings) -> dict[str, Model]:
    """`chat` and `text_mixture`, each where it is set up.

    Raises:
        ModelFailed: one is named without what it needs.
    """
    models: dict[str, Model] = {}
    if settings.text_mixture is not None:
        experts = [Expert(model=ChatModel(item), good_at=item.good_at) for item in settings.text_mixture.experts]
        models["text_mixture"] = TextMixture(experts, active=settings.text_mixture.active)
    if settings.chat is not None:
        models["chat"] = ChatModel(settings.chat)
    return models
