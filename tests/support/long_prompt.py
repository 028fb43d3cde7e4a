"""Long prompts that are the same on every machine.

The text is a ship's log put together from phrases by a small generator of its
own, so that nothing has to be downloaded and the prompt never changes.
"""

__all__ = ["long_prompt", "ship_log"]

_WIND = (
    "light airs from the south-west",
    "a steady breeze out of the north",
    "a hard gale from the east, easing after noon",
    "variable winds and long calms between them",
    "a fresh westerly with rain in it",
    "squalls from every quarter and a confused sea",
)
_WORK = (
    "The carpenter fitted a new thwart to the second cutter and tarred the seams of the first",
    "All hands scrubbed the lower deck, and the sails that had mildewed were hung out to dry",
    "The boatswain rove new braces on the foremast and condemned two fathoms of the old rope",
    "The cook opened the last cask of the old flour and found it sound but for the top inch",
    "We pumped the bilge for half an hour and sounded eleven inches where there had been twenty",
    "The gunner aired the powder and the surgeon went through the lime juice bottle by bottle",
    "The sailmaker cut a storm jib out of the split topsail and was thanked for it at supper",
)
_SEEN = (
    "At dusk the lookout saw a light low in the south and we stood towards it until it sank",
    "A raft of weed went by with three crabs on it, which the boys took for the pot",
    "Two whales kept us company through the forenoon watch, and left when the bell was struck",
    "We raised a brig hull down to leeward; she showed no colours and would not wait for us",
    "Land birds came aboard before sunset, small and brown, and slept along the hammock rail",
    "The water changed from blue to a thick green, and the lead brought up grey sand and shell",
)
_PEOPLE = (
    "Thomas Reed is well again and has gone back to his watch",
    "Old Abel Finch told the story of the lost anchor for the fourth time, and it has grown",
    "The purser and the master disagreed about candles and both of them wrote it down",
    "Young Mary Lisle, who keeps the hens, reports nine eggs and one hen missing",
    "The mate read aloud from the almanac, and nobody believed a word about the weather",
    "Two men were put to picking oakum for quarrelling over a checkerboard",
)


def _numbers(seed: int) -> "list[int]":
    """Return 4,096 numbers from a fixed linear congruential generator."""
    state, numbers = seed, []
    for _ in range(4096):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        numbers.append(state >> 33)
    return numbers


def ship_log(days: int, *, seed: int = 1) -> str:
    """Write the log of a ship's voyage.

    Parameters
    ----------
    days
        Number of entries, about 110 tokens each with SmolLM2's tokenizer.
    seed
        Another seed makes another voyage.
    """
    pool = iter(_numbers(seed))
    entries = []
    for day in range(1, days + 1):
        wind, work, seen, people = (
            phrases[next(pool) % len(phrases)] for phrases in (_WIND, _WORK, _SEEN, _PEOPLE)
        )
        miles = 40 + next(pool) % 120
        entries.append(
            f"Day {day}. {wind[0].upper()}{wind[1:]}; {miles} miles made good since yesterday. "
            f"{work}. {seen}. {people}."
        )
    return "\n\n".join(entries)


def long_prompt(days: int = 49, *, seed: int = 1) -> str:
    """Wrap a ship's log into a question in SmolLM2's chat format.

    Parameters
    ----------
    days
        Entries of the log; 49 make 4,195 tokens.
    seed
        Another seed makes another log, so that no prefix of it is shared
        beyond the first words.
    """
    return (
        "<|im_start|>user\n"
        f"This is the log of voyage {seed} of the survey ship Harrier.\n\n"
        f"{ship_log(days, seed=seed)}\n\n"
        "Summarize the voyage: the weather, the work on board and what was seen.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
