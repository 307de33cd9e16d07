/* Send window of a queue pair: see soft/objects/psn_window.h. */
#include "soft/objects/psn_window.h"

void soft_window_begin(struct soft_window *window, uint32_t psn)
{
    assert(soft_window_is_idle(window));
    window->first_psn = psn;
    window->ever_sent = window->most_received = 0;
    soft_window_check(window);
}

void soft_window_send(struct soft_window *window, uint32_t bytes, uint32_t packets, bool last, bool is_read)
{
    assert(window->sent != window->posted && packets && soft_window_has_room(window, packets));
    assert(last || bytes);
    if (!window->offset && is_read)
        window->reads++;
    window->packets += packets;
    if (window->ever_sent < window->packets)
        window->ever_sent = window->packets;
    if (last) {
        window->offset = 0;
        window->sent++;
    } else {
        window->offset += bytes;
    }
    soft_window_check(window);
}

uint32_t soft_window_locate(const struct soft_window *window, uint32_t psn)
{
    uint32_t before = (psn - window->first_psn) & SOFT_PSN_MASK;

    return before < window->packets ? before + 1 : 0;
}

bool soft_window_note_answer(struct soft_window *window, uint32_t packets)
{
    assert(packets && packets <= window->packets);
    if (packets <= window->answered)
        return false;
    window->answered = packets;
    soft_window_check(window);
    return true;
}

bool soft_window_receive(struct soft_window *window, uint32_t bytes)
{
    assert(!soft_window_is_idle(window) && window->reads);
    assert(window->sent != window->finished || bytes <= window->offset - window->received);
    window->received += bytes;
    if (window->received <= window->most_received)
        return false;
    window->most_received = window->received;
    return true;
}

void soft_window_acknowledge(struct soft_window *window, uint32_t packets, bool is_read)
{
    assert(window->sent != window->finished && packets && packets <= window->packets);
    assert(!is_read || window->reads);
    window->finished++;
    window->first_psn = (window->first_psn + packets) & SOFT_PSN_MASK;
    window->packets -= packets;
    window->ever_sent -= packets;
    window->answered = window->answered > packets ? window->answered - packets : 0;
    window->received = window->most_received = 0;
    window->reads -= is_read;
    soft_window_check(window);
}

void soft_window_fail(struct soft_window *window)
{
    soft_window_rewind(window);
    soft_window_skip(window, 0);
}

void soft_window_rewind(struct soft_window *window)
{
    window->sent = window->finished;
    window->offset = window->received = window->reads = window->packets = window->answered = 0;
    soft_window_check(window);
}

void soft_window_undo(struct soft_window *window)
{
    soft_window_rewind(window);
    window->ever_sent = 0;
}
