"""The questions that SmolLM2 is asked: made up, a kind of task times a topic."""

TASKS = (
    "Explain {} to a ten-year-old.",
    "Write a short story in which {} plays a part.",
    "What are three common mistakes people make about {}?",
    "Give me a step-by-step plan for learning more about {}.",
    "Write a poem of eight lines about {}.",
    "Compare {} with something that it is often confused with.",
    "Write a letter to a friend about {}.",
    "What questions would a journalist ask an expert on {}?",
    "Summarise what a beginner needs to know about {}.",
    "Describe {} without using the words in its name.",
    "Write a dialogue between a teacher and a pupil about {}.",
    "What is the history of {}? Keep it to a few paragraphs.",
    "List five facts about {} and say why each one matters.",
    "Argue for and against spending public money on {}.",
    "Write a product description for a book about {}.",
    "Write a Python function that has something to do with {}, and explain it.",
    "How will {} have changed in fifty years?",
    "Make a table of the advantages and disadvantages of {}.",
    "Write a quiz of four questions about {}, with answers.",
    "Give practical advice to somebody who is afraid of {}.",
    "Write an email that invites colleagues to a talk on {}.",
    "How does the weather affect {}?",
    "What does {} cost, and what does the cost depend on?",
    "Explain how {} is measured and in which units.",
    "Tell a joke about {} and explain why it is funny.",
    "Write the opening paragraph of an essay on {}.",
    "What can children learn from {}?",
    "Describe a day in the life of somebody who works with {}.",
    "Translate a simple sentence about {} into French and Spanish.",
    "What would happen if {} disappeared tomorrow?",
    "Which tools or materials does one need for {}?",
    "Write a news report about a surprising discovery in {}.",
    "Explain the connection between {} and mathematics.",
    "Give a short speech in praise of {}.",
    "What do people in different countries think of {}?",
    "Write instructions for a game that is based on {}.",
    "Rewrite this sentence in a formal style: I really like {}.",
    "Name some famous people who are known for {} and what they did.",
    "What are the risks of {} and how can they be kept small?",
    "Write a checklist for a weekend devoted to {}.",
)
TOPICS = (
    "the water cycle", "baking bread", "the Roman Empire", "black holes", "playing chess", "learning the violin",
    "electric cars", "honey bees", "the stock market", "deep-sea fish", "growing tomatoes", "the printing press",
    "solar energy", "long-distance running", "ancient Egypt", "computer viruses", "the human heart", "climbing",
    "coffee", "volcanoes", "photography", "the French Revolution", "sleep", "sailing", "recycling plastic", "dinosaurs",
    "public libraries", "jazz music", "vaccines", "train travel", "the Moon", "writing letters", "cheese making",
    "earthquakes", "robots in factories", "wild mushrooms", "bicycle repair", "the Silk Road", "optical illusions",
    "rice farming", "lighthouses", "probability", "the immune system", "street markets", "knitting", "satellites",
    "the Amazon rainforest", "board games", "wind turbines", "the invention of the telephone", "penguins", "pottery",
    "credit cards", "coral reefs", "learning a second language", "thunderstorms", "the Olympic Games", "bridges",
    "chocolate", "memory", "medieval castles", "internet search engines", "camping in winter", "the periodic table",
    "folk dances", "migratory birds", "tea ceremonies", "prime numbers", "school lunches", "glaciers", "kites",
    "the Great Wall of China", "sign language", "desert plants", "radio waves", "first aid", "map reading", "octopuses",
    "film editing", "rivers", "sourdough", "sorting algorithms", "gravity", "city parks", "dreams", "fireworks",
    "elephants", "weather forecasts", "paper", "clocks", "the Vikings", "swimming", "databases", "maple syrup",
    "the Great Barrier Reef", "poetry", "bamboo", "tides", "fossils", "public speaking", "ice cream", "telescopes",
    "cotton", "marathons", "beavers", "cathedrals", "noise", "time zones", "candles", "the violin family", "sharks",
    "soap", "railway stations", "olive oil", "crosswords", "umbrellas", "salt", "spiders", "museums", "compasses",
    "carnivals", "sunflowers", "steam engines", "whales", "origami", "juggling", "bats", "mirrors", "rainbows",
    "submarines", "the abacus", "wolves", "porcelain", "comets", "magnets", "silk", "windmills", "caves", "drums",
    "hot-air balloons", "snow", "insects", "gold", "bridges made of rope", "passwords", "forests", "ants", "opera",
    "concrete", "rockets", "owls", "puppets", "parachutes", "sugar", "the Arctic", "glass", "batteries", "horses",
    "fountains", "penicillin", "encyclopedias", "ferries", "cinnamon", "turtles", "escalators", "atoms",
)  # fmt: skip
HELD_OUT_TOPICS = 8  # the last ones: no question about them is trained on


def questions(number: int, held_out: bool) -> list[str]:
    """`number` different questions, the same ones every time; spread over tasks and topics."""
    topics = TOPICS[-HELD_OUT_TOPICS:] if held_out else TOPICS[:-HELD_OUT_TOPICS]
    if not 0 < number <= len(TASKS) * len(topics):
        raise ValueError(f"{number} questions: there are {len(TASKS) * len(topics)}")
    pairs = [(task, topic) for round_ in range(len(TASKS)) for task, topic in _diagonal(topics, round_)]
    return [task.format(topic) for task, topic in pairs[:number]]


def _diagonal(topics: tuple[str, ...], round_: int) -> list[tuple[str, str]]:
    return [(TASKS[(index + round_) % len(TASKS)], topic) for index, topic in enumerate(topics)]
