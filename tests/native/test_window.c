/* Tests of the send window, against a model that lists what is in flight, for all sequences of sends, answers and
 * losses, and all claims of a peer. */
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "soft/objects/psn_window.h"

#include "support_check.h"

enum { REQUESTS = 48, PARTS = 256, PART_BYTES = 4096 };

struct request {
    uint32_t parts; /* how many it is sent in */
    uint32_t packets[4];
    bool is_read;
};

struct flying {
    uint64_t request, psn; /* counted on from the first ones, so that none comes twice */
    uint32_t packets;
    bool last;
};

/* State of a window, in full. */
struct model {
    struct request requests[REQUESTS]; /* of the one with number n at n % REQUESTS */
    uint64_t posted, sent, taken;
    uint32_t part;  /* the next one of the request at `sent` */
    uint64_t psn;   /* of the first packet of the request at `taken` */
    uint64_t seen;  /* the first one that the peer cannot know */
    uint64_t heard; /* answers told of those before it, since they left */
    uint32_t received, reached;
    struct flying flying[PARTS];
    unsigned int count;
};

static uint64_t random_state;

static uint32_t below(uint32_t limit)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % limit);
}

static const struct request *request_at(const struct model *model, uint64_t number)
{
    return &model->requests[number % REQUESTS];
}

static uint32_t packets_of(const struct request *request)
{
    uint32_t packets = 0, i;

    for (i = 0; i < request->parts; i++)
        packets += request->packets[i];
    return packets;
}

static uint64_t next_psn(const struct model *model)
{
    const struct flying *last;

    if (!model->count)
        return model->psn;
    last = &model->flying[model->count - 1];
    return last->psn + last->packets;
}

static uint64_t reads_of(const struct model *model)
{
    uint64_t number, reads = 0;

    for (number = model->taken; number < model->sent + (model->part != 0); number++)
        reads += request_at(model, number)->is_read;
    return reads;
}

/* Count packets up to this one, by looking at each part. */
static uint32_t located(const struct model *model, uint32_t psn)
{
    uint32_t before = 0;
    unsigned int i;

    for (i = 0; i < model->count; i++) {
        const struct flying *part = &model->flying[i];
        uint32_t into = (psn - (uint32_t)part->psn) & SOFT_PSN_MASK;

        if (into < part->packets)
            return before + into + 1;
        before += part->packets;
    }
    return 0;
}

static void check_same(const struct soft_window *window, const struct model *model)
{
    REQUIRE_EQ(window->posted, (uint32_t)model->posted);
    REQUIRE_EQ(window->sent, (uint32_t)model->sent);
    REQUIRE_EQ(window->finished, (uint32_t)model->taken);
    REQUIRE_EQ(window->offset, model->part * PART_BYTES);
    REQUIRE_EQ(window->received, model->received);
    REQUIRE_EQ(window->reads, reads_of(model));
    REQUIRE_EQ(window->first_psn, model->psn & SOFT_PSN_MASK);
    REQUIRE_EQ(window->packets, next_psn(model) - model->psn);
    REQUIRE_EQ(soft_window_psn(window), next_psn(model) & SOFT_PSN_MASK);
    REQUIRE_EQ(soft_window_repeats(window), next_psn(model) < model->seen);
    REQUIRE_EQ(soft_window_is_idle(window), !model->count);
    REQUIRE(window->packets <= SOFT_WINDOW_PACKETS);
}

/* ---- What happens, to both ------------------------------------------------------------------------------------- */

/* Draw a number of packets, now and then so large that a few requests fill the window. */
static uint32_t some_packets(void)
{
    return 1 + below(below(4) ? 40 : SOFT_WINDOW_PACKETS / 6);
}

static void post(struct soft_window *window, struct model *model)
{
    uint32_t count = below(6), i, part;

    for (i = 0; i < count && model->posted - model->taken < REQUESTS; i++) {
        struct request *request = &model->requests[model->posted++ % REQUESTS];

        request->parts = 1 + below(4);
        for (part = 0; part < request->parts; part++)
            request->packets[part] = some_packets();
        request->is_read = below(2);
    }
    REQUIRE_EQ(soft_window_post(window, (uint32_t)model->posted), model->sent != model->posted);
}

static void send(struct soft_window *window, struct model *model)
{
    const struct request *request = request_at(model, model->sent);
    struct flying *part = &model->flying[model->count];
    uint64_t psn = next_psn(model);
    bool room;

    if (model->sent == model->posted || model->count == PARTS)
        return;
    *part = (struct flying){model->sent, psn, request->packets[model->part], model->part + 1 == request->parts};
    room = psn + part->packets - model->psn < 1u << 23;
    REQUIRE_EQ(soft_window_has_room(window, part->packets), room);
    if (!room)
        return;
    soft_window_send(window, PART_BYTES, part->packets, part->last, request->is_read);
    model->count++;
    if (model->seen < psn + part->packets)
        model->seen = psn + part->packets;
    model->part = part->last ? 0 : model->part + 1;
    model->sent += part->last;
}

static void rewind_model(struct model *model)
{
    model->count = model->part = model->received = 0;
    model->heard = 0;
    model->sent = model->taken;
}

/* Finish the oldest request, with all its parts. */
static void take_first(struct model *model)
{
    unsigned int parts = 0;

    while (parts < model->count && model->flying[parts].request == model->taken)
        parts++;
    model->count -= parts;
    memmove(model->flying, model->flying + parts, model->count * sizeof(model->flying[0]));
    model->taken++;
    model->received = model->reached = 0;
}

/* Apply the claim of a peer that all up to some packet was executed; the packet need not be in flight, nor ever have
 * been sent. As in the requester, requests are finished as long as the claim is about packets that were sent. */
static void answer(struct soft_window *window, struct model *model)
{
    uint32_t psn = below(3) ? (uint32_t)(model->psn + below(window->packets + 2)) : below(1u << 30), packets;

    psn &= SOFT_PSN_MASK;
    packets = soft_window_locate(window, psn);
    REQUIRE_EQ(packets, located(model, psn));
    if (packets) {
        bool more = model->psn + packets > model->heard;

        REQUIRE_EQ(soft_window_note_answer(window, packets), more);
        if (more)
            model->heard = model->psn + packets;
    }
    while (window->sent != window->finished) {
        const struct request *request = request_at(model, model->taken);
        uint32_t count = packets_of(request);

        if (count > packets)
            return;
        packets -= count;
        soft_window_acknowledge(window, count, request->is_read);
        take_first(model);
        model->psn += count;
    }
}

static void receive(struct soft_window *window, struct model *model)
{
    if (!model->count || !request_at(model, model->taken)->is_read)
        return;
    if (window->sent == window->finished && model->received == window->offset)
        return; /* all that was asked for came */
    model->received += 64;
    REQUIRE_EQ(soft_window_receive(window, 64), model->received > model->reached);
    if (model->reached < model->received)
        model->reached = model->received;
}

static void refuse(struct soft_window *window, struct model *model)
{
    if (model->taken == model->posted)
        return;
    soft_window_fail(window);
    rewind_model(model);
    model->sent = ++model->taken;
    model->reached = 0;
}

static void pass(struct soft_window *window, struct model *model)
{
    uint32_t packets = below(2) ? some_packets() : 0;

    if (model->count || model->taken == model->posted)
        return;
    soft_window_skip(window, packets);
    model->sent = ++model->taken;
    model->reached = 0;
    model->psn += packets;
    if (model->seen < model->psn)
        model->seen = model->psn;
}

static void lose(struct soft_window *window, struct model *model)
{
    if (below(2)) {
        soft_window_rewind(window);
        rewind_model(model);
    } else {
        soft_window_undo(window);
        rewind_model(model);
        model->seen = model->psn;
    }
}

static void begin(struct soft_window *window, struct model *model)
{
    uint32_t psn = below(1u << 24);

    if (model->count || model->taken != model->posted)
        return;
    soft_window_begin(window, psn);
    model->psn = model->seen = psn;
    model->heard = model->reached = 0;
}

static void random_operations_match_the_model(void)
{
    unsigned int full = 0, round, step;

    for (round = 0; round < 60; round++) {
        struct model model = {.posted = 0};
        struct soft_window window = {0};

        random_state = round;
        /* Where the counters run over soon, or the sequence numbers do. */
        model.posted = model.sent = model.taken = round % 2 ? (uint64_t)UINT32_MAX - below(60) : 0;
        window.posted = window.sent = window.finished = (uint32_t)model.taken;
        soft_window_begin(&window, round % 3 ? SOFT_PSN_MASK - below(100) : 0);
        model.psn = model.seen = window.first_psn;
        for (step = 0; step < 3000; step++) {
            uint32_t event = below(100);

            if (event < 25)
                post(&window, &model);
            else if (event < 65)
                send(&window, &model);
            else if (event < 80)
                answer(&window, &model);
            else if (event < 88)
                receive(&window, &model);
            else if (event < 92)
                pass(&window, &model);
            else if (event < 94)
                refuse(&window, &model);
            else if (event < 97)
                lose(&window, &model);
            else
                begin(&window, &model);
            check_same(&window, &model);
            full += !soft_window_has_room(&window, SOFT_WINDOW_PACKETS / 6);
        }
    }
    CHECK(full > 100); /* else the limit was not tried */
}

/* ---- In order -------------------------------------------------------------------------------------------------- */

static void a_window(struct soft_window *window, uint32_t psn, uint32_t posted)
{
    *window = (struct soft_window){0};
    soft_window_begin(window, psn);
    CHECK_EQ(soft_window_post(window, posted), posted != 0);
}

/* A refusal, and after it answers of the peer to requests behind the refused one. */
static void no_answers_after_a_refusal(void)
{
    struct soft_window window;
    uint32_t psn, i;

    a_window(&window, 100, 4);
    for (i = 0; i < 4; i++)
        soft_window_send(&window, 64, 1, true, false);
    CHECK_EQ(soft_window_locate(&window, 103), 4);
    soft_window_fail(&window);
    CHECK_EQ(window.finished, 1);
    CHECK_EQ(window.sent, 1);
    for (psn = 0; psn <= SOFT_PSN_MASK; psn++)
        if (soft_window_locate(&window, psn))
            break;
    CHECK_EQ(psn, SOFT_PSN_MASK + 1);
    for (i = 0; i < 3; i++) /* they are flushed */
        soft_window_skip(&window, 0);
    CHECK_EQ(window.finished, 4);
    CHECK(!soft_window_post(&window, 4));
}

/* The same for a message of which a part was sent. */
static void a_part_is_refused(void)
{
    struct soft_window window;

    a_window(&window, SOFT_PSN_MASK, 1);
    soft_window_send(&window, PART_BYTES, 7, false, true);
    CHECK(!soft_window_is_idle(&window));
    CHECK_EQ(soft_window_locate(&window, 5), 7);
    CHECK_EQ(soft_window_locate(&window, 6), 0);
    soft_window_fail(&window);
    CHECK(soft_window_is_idle(&window));
    CHECK_EQ(window.finished, 1);
    CHECK_EQ(window.sent, 1);
    CHECK_EQ(window.offset, 0);
    CHECK_EQ(window.reads, 0);
}

/* All sequence numbers that may be in flight can be told from earlier ones; with one more they could not. */
static void a_full_window(void)
{
    struct soft_window window;

    a_window(&window, 5, 3);
    soft_window_send(&window, 64, SOFT_WINDOW_PACKETS - 1, true, false);
    CHECK(soft_window_has_room(&window, 1));
    CHECK(!soft_window_has_room(&window, 2));
    soft_window_send(&window, 64, 1, true, false);
    CHECK(!soft_window_has_room(&window, 1));
    CHECK_EQ(window.packets, (1u << 23) - 1);
    CHECK_EQ(soft_window_locate(&window, 4), 0);
    CHECK_EQ(soft_window_locate(&window, soft_window_psn(&window)), 0);
    CHECK_EQ(soft_window_locate(&window, soft_window_psn(&window) - 1), SOFT_WINDOW_PACKETS);
    soft_window_acknowledge(&window, SOFT_WINDOW_PACKETS - 1, false);
    CHECK(soft_window_has_room(&window, SOFT_WINDOW_PACKETS - 1));
}

/* ---- Assertions ------------------------------------------------------------------------------------------------ */

static void answered_twice(struct soft_window *window)
{
    soft_window_acknowledge(window, 1, false);
    soft_window_acknowledge(window, 1, false);
}

static void passed_in_flight(struct soft_window *window)
{
    soft_window_skip(window, 0);
}

static void refused_and_answered(struct soft_window *window)
{
    soft_window_fail(window);
    soft_window_acknowledge(window, 1, false);
}

static void sent_before_it_was_posted(struct soft_window *window)
{
    soft_window_send(window, 64, 1, true, false);
    soft_window_send(window, 64, 1, true, false);
}

static void taken_back(struct soft_window *window)
{
    soft_window_post(window, 0);
}

/* These programs are built with assertions: a call that would make the counters inconsistent aborts. */
static void wrong_calls_end_the_process(void)
{
    static void (*const misuses[])(struct soft_window *) = {answered_twice, passed_in_flight, refused_and_answered,
                                                            sent_before_it_was_posted, taken_back};
    struct soft_window window;
    size_t i;

    for (i = 0; i < sizeof(misuses) / sizeof(misuses[0]); i++) {
        int status = 0;
        pid_t child;

        a_window(&window, 0, 2);
        soft_window_send(&window, 64, 1, true, false);
        child = fork();
        REQUIRE(child >= 0);
        if (!child) {
            close(STDERR_FILENO);
            misuses[i](&window);
            _exit(0);
        }
        REQUIRE_EQ(waitpid(child, &status, 0), child);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    }
}

CHECK_MAIN_ONCE(CASE(random_operations_match_the_model), CASE(no_answers_after_a_refusal), CASE(a_part_is_refused),
                CASE(a_full_window), CASE(wrong_calls_end_the_process))
