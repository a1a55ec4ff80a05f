"""What every message is: a frozen record whose fields are checked before anybody looks at them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1, max_length=200)]


class MessageBase(BaseModel):
    """Unknown fields, and numbers that are none, are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
