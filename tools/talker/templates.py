"""Our own sentences for the talker's training: patterns with slots, filled at random.

A slot is a list of choices; a choice may hold slots itself.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

_SLOTS = """
digit: zero | one | two | three | four | five | six | seven | eight | nine
small: two | three | four | five | six | seven | eight | nine | ten | eleven | twelve
teen: thirteen | fourteen | fifteen | sixteen | seventeen | eighteen | nineteen
tens: twenty | thirty | forty | fifty | sixty | seventy | eighty | ninety
number: {small} | {small} | {teen} | {tens} | {tens} {digit} | {digit} hundred
number: {small} thousand | {digit} hundred and {tens}
figure: {f1} | {f1}{f1} | {f1}{f1}{f1} | {f1},{f1}{f1}{f1} | {f1}.{f1}
f1: 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9
ordinal: first | second | third | fourth | fifth | sixth | tenth | last | next
clock: {small} o'clock | half past {small} | quarter to {small} | {small} thirty
clock: {small} {teen} | {f1}:30 | {f1}:15 pm | {f1}:45 am | noon | midnight
year: 19{f1}{f1} | 20{f1}{f1} | 18{f1}0
price: ${f1}.{f1}{f1} | ${f1}{f1} | {number} dollars | {small} euros | {tens} cents
letter: A | B | C | D | E | F | G | H | I | J | K | L | M | N | O | P | Q | R | S | T | U | V
letter: W | X | Y | Z
acronym: USB | TV | DNA | CPU | UN | FBI | GPS | PC | EU | AI | UFO | IT | API | HTML
day: Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday
month: January | February | March | April | May | June | July | August | September | October
month: November | December
when: today | tomorrow | tonight | yesterday | now | soon | later | this morning | next week
when: on {day} | at {clock} | in {month} | every {day} | after dinner
sky: sunny | cloudy | rainy | windy | cold | warm | hot | foggy | snowy | stormy | clear | humid
sky: dry | mild | icy | calm
city: London | Paris | Berlin | Tokyo | Madrid | Boston | Chicago | Denver | Sydney | Dublin
city: Seattle | Toronto | Rome | Vienna | Oslo | Lisbon | Prague | Cairo | Mumbai | Athens
city: Geneva | Houston | Glasgow | Moscow | Nairobi
name: John | Mary | Alice | Robert | Peter | Susan | David | Emma | Sarah | James | Linda
name: Michael | Anna | Thomas | Kate | Henry | Julia | Sam | Laura | Paul | Grace | Oliver
name: Victor | Nina | George | Helen | Martin | Rachel | Simon | Ruth
person: {name} | the doctor | my neighbor | our teacher | the driver | her sister | the boss
person: his uncle | a stranger | the nurse | my friend | the captain | the waiter
pronoun: I | you | we | they | he | she | it
thing: book | phone | message | file | report | letter | picture | song | computer | model
thing: server | package | ticket | door | window | car | bag | lamp | cup | table | coffee | tea
thing: key | camera | map | project | code | speaker | microphone | sample | stream | sentence
thing: voice | bottle | blanket | knife | ladder | engine | bicycle | sandwich | candle | wallet
thing: umbrella | bucket | jacket | pencil | mirror | guitar | basket | hammer | envelope
thing: battery | cable | keyboard | printer | screen | button | radio | pillow | spoon
thing: suitcase
place: room | house | office | garden | kitchen | library | station | market | park | hospital
place: school | museum | bank | airport | harbor | forest | cellar | factory | theater | village
place: bakery | church | bridge | tunnel
verb: open | close | read | send | find | save | play | stop | start | check | bring | move
verb: clean | fix | load | print | share | delete | update | copy | carry | paint | sell | buy
verb: hide | wash | fold | pack | count | paint | choose
done: sent | saved | opened | moved | cleaned | loaded | updated | found | closed | started
done: broken | sold | lost | stolen | repaired | returned | cancelled | checked | finished
done: painted | delivered
kind: new | old | small | large | red | blue | green | simple | quick | slow | quiet | loud
kind: bright | dark | clean | heavy | light | fast | good | short | long | strange | cheap
kind: wooden | broken | empty | round | soft | narrow | yellow
feel: happy | tired | hungry | busy | late | ready | sorry | sure | right | wrong | afraid
feel: proud | lucky | early | safe | thirsty | sleepy | curious | angry | fine | serious | alone
hello: Hello | Hi | Good morning | Good evening | Good afternoon | Hey | Welcome
friends: there | everyone | friends | again | {name} | sir | madam | all | team
ask: Please | Could you | Can you | Would you | You should | Do not | Let us | Now
wh: Where | When | How | Why
aux: did | does | will | can | should | would
whose: the | my | this | that | your | our | his | her
"""

SLOTS: dict[str, list[str]] = {}
for _line in _SLOTS.strip().splitlines():
    _name, _choices = _line.split(": ", 1)
    SLOTS.setdefault(_name, []).extend(_choices.split(" | "))

LONG = (
    "{hello} {friends}, how are you {when}?",
    "{hello} {friends}, and thank you for calling the {place}.",
    "{hello}, this is {name} speaking, what can I do for you?",
    "The time is {clock}.",
    "It is {clock} on {day} in {city}.",
    "Today is {day}, the {ordinal} of {month}.",
    "The weather in {city} is {sky} and {sky} {when}.",
    "It will be {sky} {when}, with a high of {number} degrees.",
    "Expect {sky} weather in {city} and {sky} weather in {city}.",
    "{digit} {digit} {digit} {digit} {digit} {digit}.",
    "My {thing} number is {digit} {digit} {digit}, {digit} {digit} {digit}.",
    "The code is {letter} {letter} {digit} {letter} {digit}.",
    "The {place} spent {price} on {acronym} and {acronym}.",
    "{ask} {verb} the {kind} {thing} {when}.",
    "{ask} {verb} {whose} {thing} before {clock}, please.",
    "{ask} {verb} the {thing} and {verb} the {kind} {thing} in the {place}.",
    "{person} said that the {thing} is very {kind}.",
    "{person} thinks that {whose} {thing} was {done} {when}.",
    "There are {number} {kind} people in the {place}.",
    "There were {figure} visitors in the {place} in {year}.",
    "{wh} {aux} {pronoun} {verb} {whose} {thing}?",
    "{wh} {aux} {person} {verb} {whose} {kind} {thing} {when}?",
    "{whose} {kind} {thing} has been {done} {when}.",
    "{whose} {thing} was {done} in the {place}, but nobody was {feel}.",
    "The {thing} costs {price}, and the {kind} one costs {price}.",
    "We paid {price} for the {thing} {when}.",
    "If you are {feel}, {verb} the {thing} and call {person}.",
    "When {person} came home, the {thing} was {done} and the {place} was {kind}.",
    "I am {feel}, but {person} is {feel} {when}.",
    "{person} went to the {place} {when} to {verb} a {kind} {thing}.",
    "The {ordinal} {thing} is {kind}, the {ordinal} one is {kind}.",
    "In {year}, {person} moved from {city} to {city}.",
    "Turn {thing} number {number} to the left, then {verb} the {thing}.",
    "Do you want the {kind} {thing} or the {kind} one?",
    "You can {verb} the {thing}, {verb} it again, or {verb} the {kind} {thing}.",
)

SHORT = (
    "{hello}.",
    "{hello} {friends}.",
    "{hello}, {name}!",
    "Thank you, {name}.",
    "Yes, {name}.",
    "No, {name}.",
    "{name}?",
    "{name}.",
    "{day}.",
    "{month}.",
    "{city}.",
    "{number}.",
    "{digit} {digit}.",
    "{digit} {digit} {digit}.",
    "{letter}.",
    "{letter} {letter} {letter}.",
    "{acronym}.",
    "{clock}.",
    "At {clock}.",
    "On {day}.",
    "In {month}.",
    "{when}.",
    "{when}?",
    "{verb} it.",
    "{verb} it {when}.",
    "{verb} {whose} {thing}.",
    "{verb} the {kind} {thing}.",
    "The {thing}.",
    "The {kind} {thing}.",
    "{kind} {thing}.",
    "{thing}?",
    "{thing}.",
    "{place}!",
    "{kind}.",
    "{feel}?",
    "So {feel}!",
    "I am {feel}.",
    "Are you {feel}?",
    "It is {sky}.",
    "Very {sky} {when}.",
    "{person} is {feel}.",
    "Where is {person}?",
    "Who {done} it?",
    "It was {done}.",
    "{number} {thing}s.",
    "{price}.",
    "Another {thing}, please.",
    "Not the {thing}.",
    "What a {kind} {thing}!",
    "How {kind}!",
    "Why not {when}?",
    "See you {when}.",
    "Call {person}.",
    "{pronoun} {done} it.",
    "{wh} {aux} {pronoun}?",
)

_SLOT = re.compile(r"\{(\w+)\}")


def fill(pattern: str, rng: random.Random) -> str:
    """A sentence of a pattern, each slot chosen at random, with a capital at the start."""
    text = pattern
    while (filled := _SLOT.sub(lambda slot: rng.choice(SLOTS[slot.group(1)]), text)) != text:
        text = filled
    return text[0].upper() + text[1:]
