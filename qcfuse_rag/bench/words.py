"""Words for the keys of generated tasks: an adjective and a noun make a key that no haystack holds by chance."""

ADJECTIVES = tuple(
    """
    amber ancient bitter blue bold brave brief bright brisk broad calm clever cold crisp curious dark deep dusty eager
    early faint fierce gentle golden grand green happy heavy hollow humble idle jolly keen kind late lazy light lively
    lonely loud lucky mellow merry mild modest narrow noble odd pale patient plain polite proud quick quiet rapid rare
    red rough round rusty shy silent silver simple sleepy slow smooth soft solid spare steady steep stern stout strange
    sunny sweet swift tall tame tender thin tidy tiny urban vast vivid warm weary wide wild wise witty young zesty
    """.split()  # noqa: SIM905
)

NOUNS = tuple(
    """
    acorn anchor apron arrow badge barrel basket beacon bell blanket boat bottle bridge broom bucket button cabin
    candle canoe carpet castle chimney clock cloud compass copper cradle curtain desk drum engine falcon feather fence
    ferry field flute forest fountain garden glove hammer harbor hedge helmet hinge island jacket jar kettle kite
    ladder lantern lemon letter lever lily magnet maple marble meadow mirror needle oar orchard otter oven paddle
    parcel pebble pencil piano pillow pocket quarry quilt rabbit ribbon river rope saddle sail shovel sparrow spoon
    stove table tent thimble ticket tower trumpet tunnel umbrella valley violin wagon walnut whistle window
    """.split()  # noqa: SIM905
)
