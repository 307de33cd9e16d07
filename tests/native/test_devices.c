/* Tests of the devices of one process: one without an address, and one for each address. */
#include "support.h"

#include "soft/api/device.h"
#include "soft/base/address.h"
#include "soft/objects/device.h"
#include "soft/objects/gids.h"
#include "soft/objects/pd_share.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

static struct soft_address address_of(int family, const char *text, uint16_t port)
{
    struct soft_address address = {.family = family, .port = port};

    REQUIRE_EQ(inet_pton(family, text, address.bytes), 1);
    return address;
}

/* Return a loopback address that no other process of the tests uses. */
static struct soft_address own_address(uint16_t port)
{
    uint32_t process = (uint32_t)getpid();

    return (struct soft_address){
        .family = AF_INET,
        .port = port,
        .bytes = {127, (uint8_t)(128 | process >> 16), (uint8_t)(process >> 8), (uint8_t)process}};
}

static void open_at(struct home *home, struct soft_address address)
{
    struct check_variant like = *variant;

    like.options.address = address;
    home_open_like(home, &like);
}

static union ibv_gid gid_of(const struct home *home, int index)
{
    union ibv_gid gid;

    REQUIRE_EQ(soft_verbs.query_gid(home->context, 1, index, &gid), 0);
    return gid;
}

static bool same_gid(union ibv_gid one, union ibv_gid other)
{
    return !memcmp(one.raw, other.raw, sizeof(one.raw));
}

/* ---- Addresses --------------------------------------------------------------------------------------------- */

static const struct named {
    int family;
    uint16_t port;
    const char *address, *name, *gid;
} all_named[] = {
    {AF_INET, 7470, "10.0.0.1", "soft0@10.0.0.1:7470", "::ffff:10.0.0.1"},
    {AF_INET, 7471, "10.0.0.1", "soft0@10.0.0.1:7471", "::1d2f:ffff:10.0.0.1"},
    {AF_INET, 7470, "127.0.0.1", "soft0@127.0.0.1:7470", "::1d2e:ffff:127.0.0.1"},
    {AF_INET, 65535, "223.255.255.255", "soft0@223.255.255.255:65535", "::ffff:ffff:223.255.255.255"},
    {AF_INET6, 7470, "fd00::1", "soft0@[fd00::1]:7470", "fd00::1"},
    {AF_INET6, 1, "::1", "soft0@[::1]:1", "::1"},
    {AF_INET6, 65535, "2001:db8:1111:2222:3333:4444:5555:6666", "soft0@[2001:db8:1111:2222:3333:4444:5555:6666]:65535",
     "2001:db8:1111:2222:3333:4444:5555:6666"},
};

static void names_and_gids(void)
{
    const size_t room = sizeof(((struct ibv_device *)0)->name);
    char name[sizeof(((struct ibv_device *)0)->name)];
    size_t i;

    for (i = 0; i < COUNT_OF(all_named); i++) {
        const struct named *named = &all_named[i];
        struct soft_device device = {.address = address_of(named->family, named->address, named->port)};
        struct soft_address gid = address_of(AF_INET6, named->gid, 1);

        CHECK(soft_address_is_usable(&device.address));
        soft_device_name(&device.address, name, room);
        CHECK(!strcmp(name, named->name));
        CHECK_EQ(soft_gids_init(&device), 0);
        CHECK(!memcmp(device.gids[1].raw, gid.bytes, 16));
        CHECK_EQ(soft_gid_is_ipv4(&device.gids[1]), named->family == AF_INET);
        CHECK_EQ(device.gids[0].raw[0], 0xfe);
        CHECK_EQ(device.gids[0].raw[8] & 3, 2);
    }
}

static void refused(void)
{
    static const struct {
        int family;
        uint16_t port;
        const char *address;
    } wrong[] = {
        {AF_INET, 7470, "0.0.0.0"},
        {AF_INET, 7470, "0.1.2.3"},
        {AF_INET, 7470, "224.0.0.1"},
        {AF_INET, 7470, "169.254.1.1"},
        {AF_INET, 7470, "255.255.255.255"},
        {AF_INET6, 7470, "::"},
        {AF_INET6, 0, "fd00::1"},
        {AF_INET6, 7470, "::ffff:10.0.0.1"},
        {AF_INET6, 7470, "::10.0.0.1"},
        {AF_INET6, 7470, "fe80::1"},
        {AF_INET6, 7470, "febf::1"},
        {AF_INET6, 7470, "ff02::1"},
        {AF_INET6, 7470, "::1d2e:ffff:10.0.0.1"},
    };
    struct soft_options options = variant->options;
    size_t i;

    for (i = 0; i < COUNT_OF(wrong); i++) {
        options.address = address_of(wrong[i].family, wrong[i].address, wrong[i].port);
        CHECK_REFUSED(soft_open(&options), EINVAL);
    }
    options.address.family = AF_UNIX;
    CHECK_REFUSED(soft_open(&options), EINVAL);
}

/* ---- Several of them --------------------------------------------------------------------------------------- */

static void one_for_each_address(void)
{
    struct home homes[4];
    int i, j;

    home_open(&homes[0]);
    open_at(&homes[1], own_address(7470));
    open_at(&homes[2], own_address(7471));
    open_at(&homes[3], own_address(7470));
    CHECK(!strcmp(homes[0].context->device->name, "soft0"));
    CHECK(!strcmp(homes[1].context->device->dev_name, homes[1].context->device->name));
    for (i = 0; i < 4; i++)
        for (j = 0; j < i; j++) {
            bool same = i == 3 && j == 1;

            CHECK_EQ(homes[i].context->device == homes[j].context->device, same);
            CHECK_EQ(!strcmp(homes[i].context->device->name, homes[j].context->device->name), same);
            CHECK_EQ(same_gid(gid_of(&homes[i], 0), gid_of(&homes[j], 0)), same);
            CHECK_EQ(same_gid(gid_of(&homes[i], 1), gid_of(&homes[j], 1)), same);
        }
    for (i = 0; i < 4; i++)
        home_close(&homes[i]);
}

static enum ibv_port_state port_state(const struct home *home)
{
    struct ibv_port_attr attr;

    REQUIRE_EQ(verbs_query_port(home->context, 1, &attr), 0);
    return attr.state;
}

static void every_device_has_a_port(void)
{
    struct home plain, named, again;

    home_open(&plain);
    open_at(&named, own_address(7470));
    open_at(&again, own_address(7470));
    CHECK_EQ(soft_set_port(named.context, false), 0);
    CHECK_EQ(port_state(&plain), IBV_PORT_ACTIVE);
    CHECK_EQ(port_state(&named), IBV_PORT_DOWN);
    CHECK_EQ(port_state(&again), IBV_PORT_DOWN);
    CHECK_EQ(soft_set_port(again.context, true), 0);
    CHECK_EQ(port_state(&named), IBV_PORT_ACTIVE);
    home_close(&plain);
    home_close(&named);
    home_close(&again);
}

static void a_domain_is_one_device_s(void)
{
    struct home plain, named;
    struct ibv_pd *instance;
    uint32_t share;

    home_open(&plain);
    open_at(&named, own_address(7470));
    REQUIRE_EQ(soft_alloc_shpd(named.base, 7, &share), 0);
    CHECK_REFUSED(soft_share_pd(plain.context, share, 7), ENOENT);
    instance = soft_share_pd(named.context, share, 7);
    REQUIRE(instance != NULL);
    CHECK_EQ(soft_verbs.dealloc_pd(instance), 0);
    home_close(&plain);
    home_close(&named);
}

static void the_system_chooses_a_port(void)
{
    struct home first, again, other, later;
    union ibv_gid gid;

    open_at(&first, own_address(0));
    open_at(&again, own_address(0));
    open_at(&other, own_address(7470));
    gid = gid_of(&first, 1);
    CHECK(gid.raw[8] || gid.raw[9]); /* of the loopback network, every device's address has its port in the GID */
    CHECK(first.context->device == again.context->device);
    CHECK(first.context->device != other.context->device);
    CHECK(!same_gid(gid, gid_of(&other, 1)));
    home_close(&again);
    home_close(&first);
    open_at(&later, own_address((uint16_t)(gid.raw[8] << 8 | gid.raw[9]))); /* the port names the device as well */
    CHECK(same_gid(gid, gid_of(&later, 1)));
    home_close(&later);
    open_at(&later, own_address(0));
    CHECK(same_gid(gid, gid_of(&later, 1)));
    home_close(&later);
    home_close(&other);
}

static void no_port_of_another_host(void)
{
    struct soft_options options = variant->options;
    char why[SOFT_ERROR_TEXT];

    options.address = address_of(AF_INET, "192.0.2.1", 0);
    options.error_text = why;
    CHECK_REFUSED(soft_open(&options), EADDRNOTAVAIL);
    CHECK(strstr(why, "a TCP port of soft0@192.0.2.1:0: "));
}

/* Queue pair numbers of both devices are the same, but a message to the other device does not reach this device's queue
 * pair. */
static void devices_are_separate(void)
{
    struct ibv_qp_attr attr = default_link;
    struct home plain, named;
    struct end own, other;
    struct ibv_wc wc;

    home_open(&plain);
    open_at(&named, own_address(7470));
    end_open(&own, &plain, &(struct pair_options){0});
    end_open(&other, &named, &(struct pair_options){0});
    REQUIRE_EQ(qp_to_init(own.qp, &default_link), 0);
    attr.qp_state = IBV_QPS_RTR;
    attr.dest_qp_num = own.qp->qp_num;
    attr.ah_attr = path_to_self(named.context);
    REQUIRE_EQ(soft_verbs.modify_qp(own.qp, &attr, MASK_RTR), 0);
    REQUIRE_EQ(qp_to_rts(own.qp, &default_link), 0);
    CHECK_EQ(post_receive(&own, 1, 64), 0);
    CHECK_EQ(post_send(&own, 2, 64), 0);
    EXPECT(own.send_cq, 2, IBV_WC_RETRY_EXC_ERR);
    wc = EXPECT(own.recv_cq, 1, IBV_WC_WR_FLUSH_ERR);
    CHECK_EQ(wc.qp_num, own.qp->qp_num);
    end_close(&own);
    end_close(&other);
    home_close(&plain);
    home_close(&named);
}

CHECK_MAIN(CASE(names_and_gids), CASE(refused), CASE(one_for_each_address), CASE(every_device_has_a_port),
           CASE(a_domain_is_one_device_s), CASE(the_system_chooses_a_port), CASE(no_port_of_another_host),
           CASE(devices_are_separate))
