"""What is asked: one long system prompt, eight visitors, and one of them asks on."""

from __future__ import annotations

from pathlib import Path

HANDBOOK = Path(__file__).with_name("handbook.md")

QUESTIONS = (
    "Explain step by step how to become a member.",
    "Write a short welcome message for new members.",
    "I want to learn how to use the 3D printers. Where do I start?",
    "Write a short advertisement for the book sale in October.",
    "Write a sign for the door that explains the opening hours.",
    "Write three tips for a student who wants to study here.",
    "Write a letter to a school class that will visit the library.",
    "Which services of the library are free?",
)

# The first visitor goes on after the answer.
SECOND_QUESTION = "What else can I do in the library?"
THIRD_QUESTION = "What do I do when I lose my card?"


def system_prompt() -> str:
    """About 2,000 tokens."""
    return HANDBOOK.read_text(encoding="utf-8").strip()
