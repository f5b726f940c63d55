// Prints the ids of an AR stage's requests as JSON lines, and ends after so many requests:
//   node subscriber.js ENDPOINT CHANNEL/SUBSCRIBER REQUESTS
// It follows docs/protocol.md, "The whole of a subscriber", for a stage with one publisher.
"use strict"
const { randomBytes } = require("node:crypto")
const { decode, encode } = require("@msgpack/msgpack")
const { Dealer, Subscriber } = require("zeromq")

const VERSION = 1
const BIG = { useBigInt64: true } // an epoch has 62 bits, a double 53
const [endpoint, name, requests] = process.argv.slice(2)
const topic = Buffer.from(`${name}\0`)
const data = new Subscriber({ linger: 0 })
let delivery, epoch, sending, heard
let expected = 0 // the next sequence
let known = 0 // what is below it was sent
let unacknowledged = 0
let attempts = 0
let ends = 0
let done = false
const waiting = new Map() // sequence -> updates of messages that came too early
const timers = {}

function after(what, milliseconds, call) {
  timers[what] ??= setTimeout(() => { delete timers[what]; call() }, milliseconds)
}

function send(tag, ...fields) {
  const socket = delivery // one send at a time is a rule of the library's
  const message = encode([tag, VERSION, epoch, ...fields], BIG)
  sending = Promise.resolve(sending).then(() => socket.send(message)).catch(() => {})
}

function acknowledge() {
  unacknowledged = 0
  send("ack", [[topic, expected]])
}

function fail(why) {
  console.error(why)
  process.exit(1)
}

function subscribed([, , newEpoch, , next, where]) {
  if (newEpoch !== epoch) {
    if (epoch !== undefined) fail("the publisher restarted: what was open is lost")
    ;[epoch, expected, known] = [newEpoch, Number(next), Number(next)]
    delivery = new Dealer({ routingId: randomBytes(16), linger: 1000 })
    delivery.connect(where)
    listen(delivery, fromDelivery)
    after("silence", 3000, () => fail("no heartbeat for 3 s"))
  }
  known = Math.max(known, Number(next))
  acknowledge()
}

function heartbeat([, , theirs, , topics]) {
  if (theirs !== epoch) return
  if (!heard) console.error("subscribed") // now requests may be submitted
  heard = true
  timers.silence?.refresh()
  const [, first, next] = topics.find(([bytes]) => topic.equals(bytes)) ?? [, 0, -1]
  if (Number(first) > expected) fail(`${Number(first) - expected} messages are lost`)
  known = Math.max(known, Number(next))
  if (expected === Number(next)) send("ack", []) // it knows: only a sign of life
  else acknowledge()
  if (expected < known) after("ask", 100, ask) // the last ones may be on their way
}

function take([, , theirs, , number, , updates]) {
  const sequence = Number(number)
  if (theirs !== epoch || sequence < expected || waiting.has(sequence)) return
  waiting.set(sequence, updates)
  known = Math.max(known, sequence + 1)
  for (; waiting.has(expected); expected++) {
    waiting.get(expected).forEach(print)
    waiting.delete(expected)
    attempts = 0
    if (++unacknowledged >= 16) acknowledge()
    else after("ack", 20, () => unacknowledged && acknowledge())
  }
  if (waiting.size) after("ask", 0, ask)
  if (ends >= requests) leave()
}

function ask() { // again for what is missing, ten times
  if (expected >= known) return
  if (attempts === 10) fail("what is missing does not come")
  send("replay", topic, expected, waiting.size ? Math.min(...waiting.keys()) : known)
  after("ask", Math.min(50 * 2 ** attempts++, 500), ask)
}

function print([request, , , position = 0, ids = [], , , terminal]) {
  ends += terminal ? 1 : 0
  console.log(JSON.stringify({ request, position, ids, end: terminal?.[0] ?? null }))
}

async function leave() {
  if (done) return
  done = true
  Object.values(timers).forEach(clearTimeout)
  acknowledge()
  send("leave", topic)
  await sending
  data.close()
  delivery.close()
}

function fromDelivery(frames) { // a message that was sent again has its topic before it
  if (frames.length === 1) heartbeat(decode(frames[0], BIG))
  else take(decode(frames[1], BIG))
}

function fromData([, header]) {
  const message = decode(header, BIG)
  if (message[1] !== VERSION) fail(`the publisher speaks protocol ${message[1]}`)
  if (message[0] === "subscribed") subscribed(message)
  else take(message)
}

async function listen(socket, call) {
  for await (const frames of socket) if (!done) call(frames)
}

function confirm(milliseconds) { // again, until a heartbeat says that the publisher knows us
  if (heard || done) return
  data.unsubscribe(topic)
  data.subscribe(topic)
  after("confirm", milliseconds, () => confirm(Math.min(2 * milliseconds, 2000)))
}

data.connect(endpoint)
listen(data, fromData)
confirm(250)
