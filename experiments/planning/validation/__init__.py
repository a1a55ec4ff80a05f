"""The published figures of other systems beside what the models of `async_rlhf/plan` say of them."""
